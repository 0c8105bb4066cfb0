// What wide's two ways to divide the work between the consumer warpgroups have in common.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_WIDE_CONSUMER_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_WIDE_CONSUMER_CUH_

#include "cuda/attention/matrix_product.cuh"
#include "cuda/attention/warp.cuh"
#include "cuda/attention_backward/wide_shared.cuh"

namespace flashxla::attention_backward {

using attention::kWarpgroupThreads;

constexpr int kConsumerThreads = 2 * kWarpgroupThreads;
// Named barriers of the consumers.
constexpr int kZeroBarrier = 1, kScoresBarrier = 2;

#if defined(FLASHXLA_HOPPER)

using attention::Exp2;
using attention::MatrixDescriptor;
using attention::MatrixProduct;
using attention::Pack;
using attention::Pin;

__device__ inline void StoreMatrices(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

__device__ inline void StoreShared4(uint32_t to, float4 x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x.x), "f"(x.y), "f"(x.z),
               "f"(x.w)
               : "memory");
}

// Writes zeros to rows of a tile in shared memory that do not belong to the sequence: they may hold
// NaN, and 0 times NaN is not 0. Rows [low, high) stay. Both warpgroups must call it, with the same
// arguments.
template <int kRows, int kBlocks>
__device__ void ZeroOthers(uint32_t tile, int low, int high) {
  if (low <= 0 && high >= kRows) return;
  constexpr int kVectors = kRowBytes / 16;
  const int thread = threadIdx.x - kWarpgroupThreads;
  for (int i = thread; i < kRows * kBlocks * kVectors; i += kConsumerThreads) {
    const int row = i / kVectors % kRows;
    if (row >= low && row < high) continue;
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(tile + i * 16), "r"(0)
                 : "memory");
  }
  attention::FenceProxy();
  attention::SyncNamed(kZeroBarrier, kConsumerThreads);
}

// The same of an item's keys.
template <typename S>
__device__ void ZeroOtherKeys(const WideShared<S>& shared) {
  const auto item = LoadShared<WideItem>(shared.item());
  ZeroOthers<S::kKeyTile, S::kBlocks>(shared.keys(), item.low_key - item.first_key,
                                      item.high_key - item.first_key);
}

// Which queries see the keys of this thread, rows row and row + 8 of the key tile, and the 64 keys
// of its warpgroup, from row group_row on.
struct KeyRows {
  int low[2], high[2];    // queries that see each key
  int low_all, high_all;  // queries that see all 64 keys
  int position;           // of the first key of the two, relative to the sequence's first query

  __device__ KeyRows(const Problem& p, const WideItem& item, int group_row, int row) {
    const int first = item.first_key + group_row;
    low_all = item.FirstQuery(p.window, first + 63), high_all = item.EndQuery(p.window, first);
    if (first < item.low_key || first + 64 > item.high_key) low_all = item.num_queries;
    position = item.first_key + row - item.offset;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int j = item.first_key + row + 8 * r;
      const bool exists = j >= item.low_key && j < item.high_key;
      low[r] = exists ? item.FirstQuery(p.window, j) : item.num_queries;
      high[r] = exists ? item.EndQuery(p.window, j) : 0;
    }
  }
};

// Writes columns from `column` on of rows row and row + 8 of a key tile's gradients.
template <typename T, int kColumns>
__device__ void StoreKeys(const Rows& to, const WideItem& item, int head_size, int row, int column,
                          float scale, const float (&grad)[kColumns / 2]) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int j = item.first_key + row + 8 * r;
    if (j < item.low_key || j >= item.high_key) continue;
    T* out = reinterpret_cast<T*>(to.data) + (item.key_row + j) * to.stride_token +
             item.kv_head * to.stride_head;
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i) {
      const int d = column + i * 8 + lane % 4 * 2;
      if (d < head_size) {
        *reinterpret_cast<uint32_t*>(out + d) =
            Pack<T>(grad[i * 4 + 2 * r] * scale, grad[i * 4 + 2 * r + 1] * scale);
      }
    }
  }
}

// The scores of a warpgroup's 64 keys and kQueries queries, as wgmma's accumulators hold them.
template <typename T, int kQueries>
struct WideScores {
  static constexpr int kCount = kQueries / 2;
  using Fragments = uint32_t[kQueries / 16][4];  // rounded, as operands with rows of keys

  const Problem& p;
  int low[2], high[2];  // the columns that see each key, relative to this thread's first one
  bool masked;
  float slope2;    // ALiBi's
  float distance;  // from this thread's first key to its first column's query

  // first_query: of the columns.
  __device__ WideScores(const Problem& problem, const KeyRows& rows, int first_query, float slope)
      : p(problem), slope2(slope) {
    const int offset = first_query + threadIdx.x % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) low[r] = rows.low[r] - offset, high[r] = rows.high[r] - offset;
    distance = static_cast<float>(offset - rows.position);
    masked = first_query < rows.low_all || first_query + kQueries > rows.high_all;
  }

  // Turns scores into weights, and then into what the gradients of the scores are multiplied by.
  // lse2: of this thread's first column.
  __device__ void Weigh(float (&score)[kCount], uint32_t lse2, Fragments& weights) const {
    slope2 != 0.f ? WeighAs<true>(score, lse2, weights) : WeighAs<false>(score, lse2, weights);
  }

  // The gradients of the scores, from Weigh's result and the products of values and grad_out.
  __device__ void Differentiate(const float (&score)[kCount], const float (&product)[kCount],
                                uint32_t delta, Fragments& gradients) const {
    masked ? DifferentiateAs<true>(score, product, delta, gradients)
           : DifferentiateAs<false>(score, product, delta, gradients);
  }

 private:
  __device__ bool Sees(int column, int r) const { return column >= low[r] && column < high[r]; }

  template <bool kAlibi>
  __device__ void WeighAs(float (&score)[kCount], uint32_t lse2, Fragments& weights) const {
    if (p.softcap > 0.f) {
      masked ? WeighAs<kAlibi, true, true>(score, lse2, weights)
             : WeighAs<kAlibi, true, false>(score, lse2, weights);
    } else {
      masked ? WeighAs<kAlibi, false, true>(score, lse2, weights)
             : WeighAs<kAlibi, false, false>(score, lse2, weights);
    }
  }

  template <bool kAlibi, bool kSoftcap, bool kMasked>
  __device__ void WeighAs(float (&score)[kCount], uint32_t lse2, Fragments& weights) const {
    // softmax_scale, in log2, and what turns products into softcap's argument.
    const float scale2 = (kSoftcap ? p.softcap : p.softmax_scale) * kLog2e;
    const float cap_scale = kSoftcap ? 2.f * kLog2e * p.softmax_scale / p.softcap : 0.f;
#pragma unroll
    for (int i = 0; i < kQueries / 8; ++i) {
      const float2 base = LoadShared<float2>(lse2 + i * 32);
      float weight[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& x = score[i * 4 + j];
        // tanh(x) = 1 - 2 / (1 + e^2x), to 1e-7.
        if (kSoftcap) x = 1.f - __fdividef(2.f, 1.f + Exp2(x * cap_scale));
        float exponent = fmaf(x, scale2, -(j % 2 ? base.y : base.x));
        if (kAlibi) {
          exponent = fmaf(-slope2, fabsf(distance + static_cast<float>(i * 8 + j % 2 - j / 2 * 8)),
                          exponent);
        }
        weight[j] = Exp2(exponent);
        if (kMasked && !Sees(i * 8 + j % 2, j / 2)) weight[j] = 0.f;
        x = kSoftcap ? weight[j] * (1.f - x * x) : weight[j];
      }
      weights[i / 2][i % 2 * 2] = Pack<T>(weight[0], weight[1]);
      weights[i / 2][i % 2 * 2 + 1] = Pack<T>(weight[2], weight[3]);
    }
  }

  template <bool kMasked>
  __device__ void DifferentiateAs(const float (&score)[kCount], const float (&product)[kCount],
                                  uint32_t delta, Fragments& gradients) const {
#pragma unroll
    for (int i = 0; i < kQueries / 8; ++i) {
      const float2 of_row = LoadShared<float2>(delta + i * 32);
      float x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        x[j] = score[i * 4 + j] * (product[i * 4 + j] - (j % 2 ? of_row.y : of_row.x));
        if (kMasked && !Sees(i * 8 + j % 2, j / 2)) x[j] = 0.f;
      }
      gradients[i / 2][i % 2 * 2] = Pack<T>(x[0], x[1]);
      gradients[i / 2][i % 2 * 2 + 1] = Pack<T>(x[2], x[3]);
    }
  }
};

// Stores fragments of the 16 keys from row `key` on, with columns from 8 * chunk on.
template <int kCount>
__device__ void StoreFragments(uint32_t tile, int key, int chunk,
                               const uint32_t (&fragments)[kCount][4]) {
  const int lane = threadIdx.x & 31, row = key + lane % 16;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    StoreMatrices(tile + row * kRowBytes + ((chunk + 2 * k + lane / 16) ^ row % 8) * 16,
                  fragments[k]);
  }
}

// Hands a part of the sums of grad_q, kCount of each thread, to the thread that adds them. number:
// of all parts. vector(i): four of them.
template <int kCount, typename S, typename Vector>
__device__ void HandOverSums(const WideShared<S>& shared, uint32_t number, int group,
                             Vector&& vector) {
  attention::WaitBarrier(shared.sums_empty(), number % 2 ^ 1);
  const int thread = threadIdx.x % kWarpgroupThreads;
  const uint32_t to = shared.sums() + (group * (kCount / 4) * kWarpgroupThreads + thread) * 16;
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    StoreShared4(to + i * kWarpgroupThreads * 16, vector(i));
  }
  attention::FenceProxy();
  attention::Release(shared.sums_full());
}

// The consumer warpgroup of this thread, 0 or 1, and the steps of an item; < 0: there is none. The
// same in all threads of a warp, which the compiler must see: addresses of operands come from it.
__device__ inline int ConsumerGroup() {
  return __shfl_sync(attention::kAllLanes, threadIdx.x / kWarpgroupThreads, 0) - 1;
}
template <typename S>
__device__ int StepsOfItem(const WideShared<S>& shared) {
  return __shfl_sync(attention::kAllLanes, LoadShared<int2>(shared.item()).y, 0);
}

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention_backward

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_WIDE_CONSUMER_CUH_
