// FLASHXLA_CHECK=1 on a GPU: copies the index tensors to host memory and runs the checks of every
// platform there. Does nothing without check_indices, or while the stream is recorded into a CUDA
// graph, since a recording cannot wait for the copies.
#ifndef FLASHXLA_CSRC_CUDA_CHECK_H_
#define FLASHXLA_CSRC_CUDA_CHECK_H_

#include <cstdint>

#include "flashxla/attention.h"
#include "flashxla/common.h"

namespace flashxla {

flashxla_status CheckAttention(const flashxla_attention_args& args,
                               const flashxla_context* context);
flashxla_status CheckSlotMapping(const flashxla_tensor& slot_mapping, int64_t num_slots,
                                 const flashxla_context* context);

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CUDA_CHECK_H_
