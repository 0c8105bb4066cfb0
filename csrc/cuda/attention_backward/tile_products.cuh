// What tile multiplies: 16-bit matrices in shared memory. They consist of slices of 16 rows: see
// cuda/attention/key_loader.cuh.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_TILE_PRODUCTS_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_TILE_PRODUCTS_CUH_

#include "cuda/attention/key_loader.cuh"
#include "cuda/attention_backward/tile_scores.cuh"

namespace flashxla::attention_backward {

template <typename T, int kDims>
struct TileProducts {
  static_assert(kSliceRows == attention::kSliceKeys);
  static constexpr int kSliceBytes = attention::kSliceBytes<kDims>;
  // Rows of the side that a thread block goes over, in a stage.
  static constexpr int kStageRows = kDims <= 128 ? 32 : 16;
  // Thread blocks that share a multiprocessor, if its shared memory allows: it bounds the
  // registers.
  static constexpr int kBlocksEach = kDims == 64 ? 3 : 256 / kDims;
  // Whether its own rows of Q and grad_out stay in registers.
  static constexpr bool kOwnInRegisters = kDims <= 128;

  // Where chunk `chunk` of a row is, 16 bytes of a matrix.
  __device__ static uint32_t Place(uint32_t matrix, int row, int chunk) {
    return matrix + row / kSliceRows * kSliceBytes +
           attention::ChunkOffset<kDims / 8>(row % kSliceRows, chunk);
  }

  // The rows of a warp, as the left factor of AddDots.
  template <bool kInRegisters>
  class OwnRows {
   public:
    __device__ void Begin(uint32_t slice) {
      address_ = slice + LeftOffset();
      if constexpr (kInRegisters) {
#pragma unroll
        for (int k = 0; k < kDims / 16; ++k) {
          attention::LoadMatrices(kept_[k], StepAddress(address_, k));
        }
      }
    }

    __device__ void Load(int k, uint32_t (&a)[4]) const {
      if constexpr (kInRegisters) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = kept_[k][i];
      } else {
        attention::LoadMatrices(a, StepAddress(address_, k));
      }
    }

   private:
    uint32_t kept_[kInRegisters ? kDims / 16 : 1][4];
    uint32_t address_;
  };

  // dots += own rows times the transpose of a matrix with kColumns rows.
  template <int kColumns, bool kInRegisters>
  __device__ static void AddDots(Columns<kColumns>& dots, const OwnRows<kInRegisters>& own,
                                 uint32_t other, int) {
    other += RightOffset();
#pragma unroll
    for (int k = 0; k < kDims / 16; ++k) {
      uint32_t a[4];
      own.Load(k, a);
#pragma unroll
      for (int n = 0; n < kColumns / 16; ++n) {
        uint32_t b[4];
        attention::LoadMatrices(b, StepAddress(other, k) + n * kSliceBytes);
        attention::Multiply<T>(dots[2 * n], a, b[0], b[1]);
        attention::Multiply<T>(dots[2 * n + 1], a, b[2], b[3]);
      }
    }
  }

  // sums += x, rounded to T, times a matrix with kColumns rows.
  template <int kColumns>
  __device__ static void AddProduct(Columns<kDims>& sums, const Columns<kColumns>& x,
                                    uint32_t other, int, bool) {
    using attention::Pack;
    other += LeftOffset();
#pragma unroll
    for (int k = 0; k < kColumns / 16; ++k) {
      const auto &low = x[2 * k], &high = x[2 * k + 1];
      const uint32_t a[4] = {Pack<T>(low[0], low[1]), Pack<T>(low[2], low[3]),
                             Pack<T>(high[0], high[1]), Pack<T>(high[2], high[3])};
#pragma unroll
      for (int n = 0; n < kDims / 16; ++n) {
        uint32_t b[4];
        attention::LoadMatricesTransposed(b, StepAddress(other, n) + k * kSliceBytes);
        attention::Multiply<T>(sums[2 * n], a, b[0], b[1]);
        attention::Multiply<T>(sums[2 * n + 1], a, b[2], b[3]);
      }
    }
  }

  // Writes a warp's sums times `factor` to rows first, first + 1, ... of a head, of which `count`
  // are the thread block's.
  __device__ static void StoreRows(const Rows& rows, int64_t first, int count, int head,
                                   int head_size, float factor, const Columns<kDims>& sums) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = threadIdx.x / 32 * kSliceRows + lane / 4 + 8 * r;
      if (row >= count) continue;
      T* to = reinterpret_cast<T*>(rows.data) + (first + row) * rows.stride_token +
              head * rows.stride_head;
#pragma unroll
      for (int n = 0; n < kDims / 8; ++n) {
        const int d = n * 8 + lane % 4 * 2;
        if (d >= head_size) continue;
        *reinterpret_cast<uint32_t*>(to + d) =
            attention::Pack<T>(sums[n][2 * r] * factor, sums[n][2 * r + 1] * factor);
      }
    }
  }

 private:
  // Where a lane reads chunk 2 * k + chunk of a row, from where it reads chunk `chunk`. Slices are
  // aligned to 128 bytes, so the swizzle is an exclusive or of address bits.
  __device__ static uint32_t StepAddress(uint32_t address, int k) {
    return (address ^ (k % 4 * 32)) + k / 4 * (kSliceRows * 128);
  }

  // Byte offset of the row and chunk that a lane names to LoadMatrices, for the left factor of a
  // product. It is also that for the right factor of AddProduct.
  __device__ static uint32_t LeftOffset() {
    const int lane = threadIdx.x & 31;
    return attention::ChunkOffset<8>((lane & 7) + (lane >> 3 & 1) * 8, lane >> 4);
  }
  // For the right factor of AddDots.
  __device__ static uint32_t RightOffset() {
    const int lane = threadIdx.x & 31;
    return attention::ChunkOffset<8>((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
  }
};

}  // namespace flashxla::attention_backward

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_TILE_PRODUCTS_CUH_
