// The sums of grad_q that wide's thread blocks add to.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_WIDE_SUMS_H_
#define FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_WIDE_SUMS_H_

#include "cuda/attention/dispatch.cuh"
#include "cuda/attention_backward/problem.cuh"

namespace flashxla::attention_backward {

// Problem::sums are those of grad_q without softmax_scale, in parts, which are added one after the
// other. A part has columns of the first warpgroup and then of the second, in the order of the
// registers that hold them: 16 bytes of each thread, then the next 16 bytes.
constexpr int WideSumParts(int dims) { return dims > 128 ? 2 : 1; }
inline int NumWideSums(const Problem& p) { return kRowTile * attention::DimsBucket(p.head_size); }

// Writes grad_q of every row of a sequence.
void LaunchWideSums(const Problem& p, cudaStream_t stream);

}  // namespace flashxla::attention_backward

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_WIDE_SUMS_H_
