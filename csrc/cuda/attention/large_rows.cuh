// How the kernels of large keep rows in shared memory: in blocks of 64 columns, of 128 bytes a row.
// In a block the 16-byte chunk c of row r is at place c ^ r % 8, as Hopper's instructions want it
// and warp-wide loads have no bank conflicts.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_LARGE_ROWS_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_LARGE_ROWS_CUH_

#include "cuda/attention/plan.cuh"

namespace flashxla::attention {

constexpr int kLargeRows = kRestQTileRows;  // of a thread block
constexpr int kLargeRowBytes = 128, kLargeBlockColumns = 64;

// Blocks of columns of a head that the matrix instructions read: columns past the head size are
// zeros.
__host__ __device__ constexpr int LargeBlocks(int head_size) {
  return (head_size + kLargeBlockColumns - 1) / kLargeBlockColumns;
}

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_LARGE_ROWS_CUH_
