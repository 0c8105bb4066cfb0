// What tile32 multiplies: float32 matrices in shared memory, by tensor cores
// (cuda/attention/tf32.cuh). Chunk c, of four numbers, of row r is at place c ^ Turn(r) of the row:
// so neither 8 lanes that read four chunks of two rows, nor those that read two chunks of every
// other row, meet in a bank.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_TILE32_PRODUCTS_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_TILE32_PRODUCTS_CUH_

#include "cuda/attention/tf32.cuh"
#include "cuda/attention/warp.cuh"
#include "cuda/attention_backward/tile_products.cuh"

namespace flashxla::attention_backward {

template <int kDims>
struct TileProducts<float, kDims> {
  static constexpr int kRowBytes = kDims * 4, kSliceBytes = kSliceRows * kRowBytes;
  static constexpr int kStageRows = kDims == 64 ? 32 : 16;
  static constexpr int kBlocksEach = kDims == 256 ? 1 : 2;
  static constexpr bool kOwnInRegisters = false;

  // Where chunk `chunk` of a row is, 16 bytes of a matrix.
  __device__ static uint32_t Place(uint32_t matrix, int row, int chunk) {
    return matrix + row * kRowBytes + (chunk ^ Turn(row)) * 16;
  }

  // The rows of a warp, as the left factor of AddDots.
  template <bool kInRegisters>
  struct OwnRows {
    static_assert(!kInRegisters);
    uint32_t slice;

    __device__ void Begin(uint32_t address) { slice = address; }
  };

  // dots += own rows times the transpose of a matrix with kColumns rows.
  template <int kColumns>
  __device__ static void AddDots(Columns<kColumns>& dots, const OwnRows<false>& own, uint32_t other,
                                 int head_size) {
    const int group = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const uint32_t row = group * kRowBytes, place = (t ^ Turn(group)) * 16;
    Columns<kColumns> rest;
    SetZero<kColumns>(rest);
    constexpr int kAtOnce = kDims == 64 ? 1 : 2;  // steps
#pragma unroll kAtOnce
    for (int d = 0; d < head_size; d += 16) {
      // In whatever order dims are summed up: a lane takes four neighbours, for two products.
      const uint32_t at = row + (place ^ d * 4);
      attention::SplitFloats<8> a;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const auto four = attention::LoadShared<float4>(own.slice + at + r * 8 * kRowBytes);
        a.Set(r, four.x), a.Set(2 + r, four.y), a.Set(4 + r, four.z), a.Set(6 + r, four.w);
      }
      attention::SplitFloats<4> b[kColumns / 8];
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        const auto four = attention::LoadShared<float4>(other + at + n * 8 * kRowBytes);
        b[n].Set(0, four.x), b[n].Set(1, four.y), b[n].Set(2, four.z), b[n].Set(3, four.w);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t *high = a.high + half * 4, *low = a.low + half * 4;
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          attention::MultiplyTf32(rest[n], low, b[n].high + half * 2);
        }
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          attention::MultiplyTf32(dots[n], high, b[n].high + half * 2);
        }
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          attention::MultiplyTf32(rest[n], high, b[n].low + half * 2);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) dots[n][i] += rest[n][i];
    }
  }

  // sums += x times a matrix with kColumns rows; masked: weights of 0 are skipped, since 0 times
  // infinity is not 0. In x, a lane has two neighbours of each 8 columns, so it takes two
  // neighbouring rows. Of each 32 dims it has 8: sums[4 * m + j] has dims 32 * m + 8 * t + j and
  // those 4 further.
  template <int kColumns>
  __device__ static void AddProduct(Columns<kDims>& sums, const Columns<kColumns>& x,
                                    uint32_t other, int head_size, bool masked) {
    if (masked && !AllFinite<kColumns>(other)) return AddSeen<kColumns>(sums, x, other);
    const int group = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    attention::SplitFloats<4> a[kColumns / 8];
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      a[n].Set(0, x[n][0]), a[n].Set(1, x[n][2]), a[n].Set(2, x[n][1]), a[n].Set(3, x[n][3]);
    }
    const uint32_t row = other + 2 * t * kRowBytes;
#pragma unroll
    for (int m = 0; m < kDims / 32; ++m) {
      if (m * 32 >= head_size) break;
      float sum[4][4] = {}, rest[4][4] = {};
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        attention::SplitFloats<2> b[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const auto four = attention::LoadShared<float4>(row + (n * 8 + i) * kRowBytes + m * 128 +
                                                          (group ^ Turn(2 * t + i)) * 16);
          b[0].Set(i, four.x), b[1].Set(i, four.y), b[2].Set(i, four.z), b[3].Set(i, four.w);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) attention::MultiplyTf32(rest[j], a[n].low, b[j].high);
#pragma unroll
        for (int j = 0; j < 4; ++j) attention::MultiplyTf32(sum[j], a[n].high, b[j].high);
#pragma unroll
        for (int j = 0; j < 4; ++j) attention::MultiplyTf32(rest[j], a[n].high, b[j].low);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m * 4 + j][i] += sum[j][i] + rest[j][i];
      }
    }
  }

  // Writes a warp's sums times `factor` to rows first, first + 1, ... of a head, of which `count`
  // are the thread block's.
  __device__ static void StoreRows(const Rows& rows, int64_t first, int count, int head,
                                   int head_size, float factor, const Columns<kDims>& sums) {
    const int group = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = threadIdx.x / 32 * kSliceRows + group + 8 * r;
      if (row >= count) continue;
      float* to = reinterpret_cast<float*>(rows.data) + (first + row) * rows.stride_token +
                  head * rows.stride_head;
#pragma unroll
      for (int m = 0; m < kDims / 32; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int d = m * 32 + t * 8 + half * 4, i = 2 * r + half;
          if (d >= head_size) continue;
          const auto &x = sums[m * 4], &y = sums[m * 4 + 1];
          const auto &z = sums[m * 4 + 2], &w = sums[m * 4 + 3];
          *reinterpret_cast<float4*>(to + d) =
              make_float4(x[i] * factor, y[i] * factor, z[i] * factor, w[i] * factor);
        }
      }
    }
  }

 private:
  __device__ static int Turn(int row) { return (row & 1) << 2 ^ (row & 6); }

  // Whether a matrix with kRows rows has only finite numbers. The same in all lanes of a warp.
  template <int kRows>
  __device__ static bool AllFinite(uint32_t matrix) {
    float probe = 0.f;
#pragma unroll
    for (int i = 0; i < kRows * kRowBytes / 512; ++i) {
      const auto four = attention::LoadShared<float4>(matrix + i * 512 + threadIdx.x % 32 * 16);
      probe = fmaf(0.f, four.x, fmaf(0.f, four.y, fmaf(0.f, four.z, fmaf(0.f, four.w, probe))));
    }
    return !__any_sync(attention::kAllLanes, probe != 0.f);
  }

  // AddProduct on CUDA cores, which skips weights of 0.
  template <int kColumns>
  __device__ static void AddSeen(Columns<kDims>& sums, const Columns<kColumns>& x, uint32_t other) {
    const int group = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll 1
      for (int c = 0; c < 8; ++c) {
        float weight[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          weight[r] = __shfl_sync(attention::kAllLanes, c % 2 ? x[n][2 * r + 1] : x[n][2 * r],
                                  group * 4 + c / 2);
        }
        const uint32_t row = other + (n * 8 + c) * kRowBytes;
#pragma unroll
        for (int m = 0; m < kDims / 32; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int chunk = m * 8 + t * 2 + half;
            const auto four = attention::LoadShared<float4>(row + (chunk ^ Turn(c)) * 16);
            const float value[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              if (weight[r] == 0.f) continue;
#pragma unroll
              for (int j = 0; j < 4; ++j) {
                float& sum = sums[m * 4 + j][2 * r + half];
                sum = fmaf(weight[r], value[j], sum);
              }
            }
          }
        }
      }
    }
  }
};

}  // namespace flashxla::attention_backward

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_TILE32_PRODUCTS_CUH_
