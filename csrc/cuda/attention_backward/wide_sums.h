// The sums of grad_q that wide's thread blocks add to.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_WIDE_SUMS_H_
#define FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_WIDE_SUMS_H_

#include "cuda/attention/dispatch.cuh"
#include "cuda/attention_backward/problem.cuh"

namespace flashxla::attention_backward {

// Problem::sums are those of grad_q without softmax_scale, in parts, which are added one after the
// other. A part has columns of the first warpgroup and then of the second, in the order of the
// registers that hold them: 16 bytes of each thread, then the next 16 bytes.
constexpr int WideSumParts(int dims) { return dims > 192 ? 2 : 1; }
inline int NumWideSums(const Problem& p) {
  return kRowTile * attention::WideHeadSizes::Bucket(p.LargerHeadSize());
}

// Each warpgroup has half of the columns of grad_q; of heads above 128 half of those of grad_k and
// grad_v, too: whole blocks of 64 columns, and where their number is odd, half of the middle one.
constexpr int WideWholeColumns(int dims) { return dims > 128 ? dims / 128 * 64 : dims / 2; }
// Where column i of a warpgroup's half is in a row.
__host__ __device__ constexpr int WideColumn(int dims, int group, int i) {
  const int whole = WideWholeColumns(dims), half = dims / 2;
  return i < whole ? group * (dims - whole) + i : whole + group * (half - whole) + i - whole;
}

// Writes grad_q of every row of a sequence.
void LaunchWideSums(const Problem& p, cudaStream_t stream);

}  // namespace flashxla::attention_backward

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_WIDE_SUMS_H_
