// What the tile engine multiplies. A thread block owns 64 rows, 16 per warp: of Q and grad_out, or
// of K and V. It goes over tiles of the other two, which all of its warps share.
//
// A matrix in shared memory consists of slices of 16 rows: see cuda/attention/key_loader.cuh. A
// float tile [16, n] lies in registers as matrix instructions have it: lane l holds rows l / 4 and
// l / 4 + 8 of columns 2 * (l % 4) and the next, of each 8 columns.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_TILE_PRODUCTS_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_TILE_PRODUCTS_CUH_

#include "cuda/attention/key_loader.cuh"
#include "cuda/attention_backward/problem.cuh"

namespace flashxla::attention_backward {

using attention::kSliceBytes;

constexpr int kSliceRows = attention::kSliceKeys;
constexpr int kOwnRows = kRowTile;
constexpr int kTileWarps = kOwnRows / kSliceRows, kTileThreads = 32 * kTileWarps;

template <int kDims, int kRows>
constexpr int kMatrixBytes = kRows / kSliceRows * kSliceBytes<kDims>;

// Starts to copy rows first, first + 1, ... of a head to shared memory. Rows from `count` on, and
// dims past head_size, become zeros.
template <int kDims, int kRows>
__device__ void StartRows(const Rows& rows, int64_t first, int count, int head, int head_size,
                          uint32_t to) {
  constexpr int kChunks = kDims / 8;
  const int chunk = threadIdx.x % kChunks;
  const bool inside = chunk * 8 < head_size;
  const char* from =
      rows.data + (first * rows.stride_token + head * rows.stride_head + chunk * 8) * 2;
#pragma unroll
  for (int i = 0; i < kRows * kChunks / kTileThreads; ++i) {
    const int row = threadIdx.x / kChunks + i * (kTileThreads / kChunks);
    const bool valid = inside && row < count;
    attention::CopyAsync16(to + row / kSliceRows * kSliceBytes<kDims> +
                               attention::ChunkOffset<kChunks>(row % kSliceRows, chunk),
                           valid ? from + row * rows.stride_token * 2 : rows.data, valid);
  }
}

// Where a lane reads chunk 2 * k + chunk of a row, from where it reads chunk `chunk`. Slices are
// aligned to 128 bytes, so the swizzle is an exclusive or of address bits.
__device__ inline uint32_t StepAddress(uint32_t address, int k) {
  return (address ^ (k % 4 * 32)) + k / 4 * (kSliceRows * 128);
}

// Byte offset of the row and chunk that a lane names to LoadMatrices, for the left factor of a
// product. It is also that for the right factor of AddProduct.
__device__ inline uint32_t LeftOffset() {
  const int lane = threadIdx.x & 31;
  return attention::ChunkOffset<8>((lane & 7) + (lane >> 3 & 1) * 8, lane >> 4);
}
// For the right factor of AddDots.
__device__ inline uint32_t RightOffset() {
  const int lane = threadIdx.x & 31;
  return attention::ChunkOffset<8>((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
}

// The rows of a warp, as the left factor of AddDots.
template <int kDims, bool kInRegisters>
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

// A float tile with kColumns columns, 8 by 8. No alias of an array: nvcc 12.4 fails on that.
template <int kColumns>
struct Columns {
  float values[kColumns / 8][4];

  __device__ float (&operator[](int n))[4] { return values[n]; }
  __device__ const float (&operator[](int n) const)[4] { return values[n]; }
};

template <int kColumns>
__device__ void SetZero(Columns<kColumns>& x) {
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[n][i] = 0.f;
  }
}

// dots += own rows times the transpose of a matrix with kColumns rows.
template <typename T, int kDims, int kColumns, bool kInRegisters>
__device__ void AddDots(Columns<kColumns>& dots, const OwnRows<kDims, kInRegisters>& own,
                        uint32_t other) {
  other += RightOffset();
#pragma unroll
  for (int k = 0; k < kDims / 16; ++k) {
    uint32_t a[4];
    own.Load(k, a);
#pragma unroll
    for (int n = 0; n < kColumns / 16; ++n) {
      uint32_t b[4];
      attention::LoadMatrices(b, StepAddress(other, k) + n * kSliceBytes<kDims>);
      attention::Multiply<T>(dots[2 * n], a, b[0], b[1]);
      attention::Multiply<T>(dots[2 * n + 1], a, b[2], b[3]);
    }
  }
}

// sums += x, rounded to T, times a matrix with kColumns rows.
template <typename T, int kDims, int kColumns>
__device__ void AddProduct(Columns<kDims>& sums, const Columns<kColumns>& x, uint32_t other) {
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
      attention::LoadMatricesTransposed(b, StepAddress(other, n) + k * kSliceBytes<kDims>);
      attention::Multiply<T>(sums[2 * n], a, b[0], b[1]);
      attention::Multiply<T>(sums[2 * n + 1], a, b[2], b[3]);
    }
  }
}

// lse2 and delta of the elements x[n] of a tile, for some n.
struct RowSums {
  float lse2[4], delta[4];
};

// Turns dots, q times k, into the weights, and, if kGrads, grads, grad_out times v, into the
// gradients of q times k but for the factor softmax_scale. `place` says where in the scores the
// tile lies:
//   RowSums Sums(int n)             of the elements x[n]
//   bool Sees(int n, int i)         whether x[n][i]'s query sees its key
//   int64_t Distance(int n, int i)  x[n][i]'s: see Problem::Score
template <bool kGrads, int kColumns, typename Place>
__device__ void Weigh(const Problem& p, const Place& place, float slope, bool masked,
                      Columns<kColumns>& dots, Columns<kColumns>& grads) {
  if (p.softcap <= 0.f && p.alibi_slopes.data == nullptr) {
    const float scale2 = p.softmax_scale * kLog2e;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      const RowSums sums = place.Sums(n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        dots[n][i] = attention::Exp2(fmaf(dots[n][i], scale2, -sums.lse2[i]));
        if constexpr (kGrads) grads[n][i] = dots[n][i] * (grads[n][i] - sums.delta[i]);
      }
    }
  } else {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      const RowSums sums = place.Sums(n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float derivative;
        const float score =
            p.Score(dots[n][i] * p.softmax_scale, slope, place.Distance(n, i), &derivative);
        dots[n][i] = attention::Exp2(fmaf(score, kLog2e, -sums.lse2[i]));
        if constexpr (kGrads) grads[n][i] = dots[n][i] * (grads[n][i] - sums.delta[i]) * derivative;
      }
    }
  }
  if (!masked) return;
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool sees = place.Sees(n, i);
      dots[n][i] = sees ? dots[n][i] : 0.f;
      if constexpr (kGrads) grads[n][i] = sees ? grads[n][i] : 0.f;
    }
  }
}

// Writes a warp's sums times `factor` to rows first, first + 1, ... of a head, of which `count` are
// the thread block's.
template <typename T, int kDims>
__device__ void StoreRows(const Rows& rows, int64_t first, int count, int head, int head_size,
                          float factor, const Columns<kDims>& sums) {
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

}  // namespace flashxla::attention_backward

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_TILE_PRODUCTS_CUH_
