// What TorchTPU asks of a plugin and only a TPU's has. PyTorch/XLA asks for none of it.
#ifndef FLASHXLA_CSRC_PJRT_TORCH_TPU_H_
#define FLASHXLA_CSRC_PJRT_TORCH_TPU_H_

#include "pjrt/pjrt_abi.h"

namespace flashxla::pjrt {

// Executable_OutputMemoryKinds; where the plugin has none, as XLA's for CPUs: "device".
Error* ExecutableOutputMemoryKinds(void* caller);

// The extension TpuTopology in front of `next`. It knows that there is one chip: a process has one
// device. Everything else is an error.
Extension* TpuTopology(Extension* next);

}  // namespace flashxla::pjrt

#endif  // FLASHXLA_CSRC_PJRT_TORCH_TPU_H_
