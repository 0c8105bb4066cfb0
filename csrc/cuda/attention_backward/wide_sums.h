// The sums of grad_q that wide's thread blocks add to.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_WIDE_SUMS_H_
#define FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_WIDE_SUMS_H_

#include "cuda/attention_backward/problem.cuh"

namespace flashxla::attention_backward {

// The head size of the instance that serves a call.
inline int WideDims(const Problem& p) { return p.head_size <= 64 ? 64 : 128; }

// Problem::sums are those of grad_q without softmax_scale, in the order of the registers that hold
// them: 16 bytes of each of a warpgroup's threads, then the next 16 bytes.
inline int NumWideSums(const Problem& p) { return kRowTile * WideDims(p); }

// Writes grad_q of every row of a sequence.
void LaunchWideSums(const Problem& p, cudaStream_t stream);

}  // namespace flashxla::attention_backward

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_WIDE_SUMS_H_
