// FLASHXLA_CHECK=1 on a GPU: the index tensors are copied to host memory and read there by the
// checks of every platform. Does nothing without check_indices, or while the stream is recorded
// into a CUDA graph, which cannot wait for a result.
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
