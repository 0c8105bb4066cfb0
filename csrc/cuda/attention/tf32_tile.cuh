// A q tile of 64 rows of float32 on tensor cores (tf32.cuh). The weighted values of each kv tile
// have sums of their own, which CUDA cores add to those before.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_TF32_TILE_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_TF32_TILE_CUH_

#include "cuda/attention/float_tiles.cuh"
#include "cuda/attention/tf32.cuh"

namespace flashxla::attention {

template <typename Tiles>
class Tf32Tile {
 public:
  using Shared = typename Tiles::Shared;

  // Computes and stores the rows whose results are finite; true if these are all. Else infinite
  // numbers, of which nothing can be split off, or values of weight 0 that are not finite may be
  // the reason. After Tiles::Begin. All threads of the block must call this.
  __device__ static bool Attend(const Problem& p, const SimtItem& item, Shared& shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Row `group` of a product is row `spread`, and so are its columns, so that loads of 16 bytes
    // have no bank conflicts.
    const int group = lane / 4, t = lane % 4;
    const int spread = group % 2 * 4 + group / 2;
    const int first_row = warp * kRows + spread;      // the other one is 8 rows below
    const bool idle = warp * kRows >= item.num_rows;  // the whole warp
    float row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {};
    float out[kGroups][4][4] = {}, score[kKeyTiles][4];
    Tiles::ForEach(
        p, item, shared,
        [&](const float* keys) {
          if (!idle) Multiply(p, shared.q + first_row * kStride, keys + spread * kStride, t, score);
        },
        [&](int first, int stage) {
          if (!idle)
            Weigh(p, item, shared, first, stage, first_row, t, score, row_max, row_sum, out);
        },
        [&](const float* values, int) {
          if (!idle) Add(p, values + t * kStride + spread * 4, score, out);
        });
    bool all = true;
    if (!idle) all = Store(p, item, shared, first_row, t, row_max, row_sum, out);
    return !__syncthreads_or(!all);
  }

 private:
  static constexpr int kDims = Tiles::kDims, kKeys = Tiles::kKeys, kWarps = Tiles::kWarps;
  static constexpr int kRows = kRestQTileRows / kWarps;
  static_assert(kRows == 16);
  static constexpr int kKeyTiles = kKeys / 8, kGroups = kDims / 32;
  static constexpr int kStride = Tiles::kStride;

  // The dot products: lane t has those of keys t and t + 4 of each 8, first of one row, then of the
  // other.
  __device__ static void Multiply(const Problem& p, const float* queries, const float* keys, int t,
                                  float (&score)[kKeyTiles][4]) {
    float rest[kKeyTiles][4] = {};
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) score[n][i] = 0.f;
    }
#pragma unroll 1
    for (int d = 0; d < p.k.head_size; d += 16) {
      // In whatever order dims are summed up: a lane takes four neighbours, for two products.
      SplitFloats<8> q;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float4 four = *reinterpret_cast<const float4*>(queries + r * 8 * kStride + d + t * 4);
        q.Set(r, four.x), q.Set(2 + r, four.y), q.Set(4 + r, four.z), q.Set(6 + r, four.w);
      }
      constexpr int kAtOnce = 4;
#pragma unroll
      for (int first = 0; first < kKeyTiles; first += kAtOnce) {
        SplitFloats<4> k[kAtOnce];
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
          const float4 four =
              *reinterpret_cast<const float4*>(keys + (first + n) * 8 * kStride + d + t * 4);
          k[n].Set(0, four.x), k[n].Set(1, four.y), k[n].Set(2, four.z), k[n].Set(3, four.w);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int n = 0; n < kAtOnce; ++n) {
            MultiplyTf32(rest[first + n], q.low + half * 4, k[n].high + half * 2);
          }
#pragma unroll
          for (int n = 0; n < kAtOnce; ++n) {
            MultiplyTf32(score[first + n], q.high + half * 4, k[n].high + half * 2);
          }
#pragma unroll
          for (int n = 0; n < kAtOnce; ++n) {
            MultiplyTf32(rest[first + n], q.high + half * 4, k[n].low + half * 2);
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) score[n][i] += rest[n][i];
    }
  }

  // Turns dot products into weights and updates the online softmax.
  __device__ static void Weigh(const Problem& p, const SimtItem& item, const Shared& shared,
                               int first, int stage, int first_row, int t,
                               float (&score)[kKeyTiles][4], float (&row_max)[2],
                               float (&row_sum)[2], float (&out)[kGroups][4][4]) {
    if (Tiles::AllSeen(item, shared, first, stage)) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) score[n][i] = item.PlainScore(score[n][i]);
      }
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const SimtRow row = shared.rows[first_row + 8 * r];
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int key = n * 8 + i * 4 + t;
            float& x = score[n][2 * r + i];
            x = item.Score(p, row, first + key, Tiles::Exists(shared, stage, key), x);
          }
        }
      }
    }
    float new_max[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      new_max[r] = row_max[r];
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        new_max[r] = fmaxf(new_max[r], fmaxf(score[n][2 * r], score[n][2 * r + 1]));
      }
      new_max[r] = MaxOfRow(new_max[r]);
    }
    if (__any_sync(kAllLanes, new_max[0] != row_max[0] || new_max[1] != row_max[1])) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float factor = Exp2(row_max[r] - SoftmaxBase(new_max[r]));
        row_max[r] = new_max[r], row_sum[r] *= factor;
#pragma unroll
        for (int m = 0; m < kGroups; ++m) {
#pragma unroll
          for (int j = 0; j < 4; ++j) out[m][j][2 * r] *= factor, out[m][j][2 * r + 1] *= factor;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float base = SoftmaxBase(row_max[r]);
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = score[n][2 * r + i];
          x = Exp2(x - base), row_sum[r] += x;
        }
      }
    }
  }

  // Adds the weighted values. Of each 32 dims a lane has dims t * 4 + j and those 16 further.
  __device__ static void Add(const Problem& p, const float* values,
                             const float (&weight)[kKeyTiles][4], float (&out)[kGroups][4][4]) {
    SplitFloats<4> w[kKeyTiles];
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      w[n].Set(0, weight[n][0]), w[n].Set(1, weight[n][2]);
      w[n].Set(2, weight[n][1]), w[n].Set(3, weight[n][3]);
    }
#pragma unroll
    for (int m = 0; m < kGroups; ++m) {
      if (m * 32 >= p.v.head_size) break;
      float sum[4][4] = {}, rest[4][4] = {};
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        SplitFloats<2> v[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float4 four =
              *reinterpret_cast<const float4*>(values + (n * 8 + i * 4) * kStride + m * 32);
          v[0].Set(i, four.x), v[1].Set(i, four.y), v[2].Set(i, four.z), v[3].Set(i, four.w);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) MultiplyTf32(rest[j], w[n].low, v[j].high);
#pragma unroll
        for (int j = 0; j < 4; ++j) MultiplyTf32(sum[j], w[n].high, v[j].high);
#pragma unroll
        for (int j = 0; j < 4; ++j) MultiplyTf32(rest[j], w[n].high, v[j].low);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[m][j][i] += sum[j][i] + rest[j][i];
      }
    }
  }

  // Stores the warp's rows whose results are finite; false if not all of a lane's are.
  __device__ static bool Store(const Problem& p, const SimtItem& item, Shared& shared,
                               int first_row, int t, const float (&row_max)[2],
                               const float (&row_sum)[2], const float (&out)[kGroups][4][4]) {
    const float value_scale = p.ValueScale(item.index, item.kv_head);
    bool all = true;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + 8 * r;
      const float total = SumOfRow(row_sum[r]);
      float probe = 0.f * total;
#pragma unroll
      for (int m = 0; m < kGroups; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if (m * 32 + half * 16 + t * 4 + j < p.v.head_size) {
              probe = fmaf(0.f, out[m][j][2 * r + half], probe);
            }
          }
        }
      }
      probe = SumOfRow(probe);
      if (row >= item.num_rows) continue;
      const bool finite = probe == 0.f;
      all = all && finite;
      if (t == 0) shared.stored[row] = finite;
      if (!finite) continue;
      const int token = item.Token(p, row), head = item.Head(p, row);
      const RowEnd end = {row_max[r], total, p.Sink(head)};
      const float factor = end.Factor() * value_scale;
      if (t == 0) p.StoreLse(token, head, end);
#pragma unroll
      for (int m = 0; m < kGroups; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int d = m * 32 + half * 16 + t * 4;
          float x[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) x[j] = out[m][j][2 * r + half] * factor;
          p.StoreOutFour(token, head, d, x);
        }
      }
    }
    return all;
  }
};

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_TF32_TILE_CUH_
