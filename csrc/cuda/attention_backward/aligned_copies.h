// Copies of tensors whose rows cannot be read and written 16 bytes at a time, as their heads or
// strides are no multiples of 16 bytes. A call on copies has engines that are many times as fast
// as the one for any rows. The copies are dense. After each head come zeros, to the next multiple
// of 16 bytes: they add nothing to a dot product, and nobody asks for their gradients.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_ALIGNED_COPIES_H_
#define FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_ALIGNED_COPIES_H_

#include <cuda_runtime.h>

#include "common/round_up.h"
#include "flashxla/attention_backward.h"

namespace flashxla::attention_backward {

// The bytes of a part of the workspace, so that the next part is aligned.
inline int64_t PartBytes(int64_t bytes) { return RoundUp(bytes, 256); }

// Whether rows can be read and written 16 bytes at a time where the address is a multiple of 16.
bool InVectors(const flashxla_tensor& t);

struct AlignedCall {
  // The call with a copy in the place of each tensor that is not InVectors. Its workspace is what
  // the copies leave of the given one.
  flashxla_attention_backward_args args;
  int64_t bytes;  // of the copies, at the start of the given workspace
};

// Its addresses mean nothing where the given call has no workspace yet.
AlignedCall AlignedCallOf(const flashxla_attention_backward_args& args);

// Fills in the copies of what `args` reads.
void LaunchFill(const flashxla_attention_backward_args& args, const AlignedCall& call,
                cudaStream_t stream);
// Writes those results of `args` that the call computed in copies.
void LaunchReturn(const flashxla_attention_backward_args& args, const AlignedCall& call,
                  cudaStream_t stream);

}  // namespace flashxla::attention_backward

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_ALIGNED_COPIES_H_
