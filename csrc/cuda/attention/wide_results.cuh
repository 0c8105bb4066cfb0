// The results of wide's rows: those of parts of a q tile, which are added up, and what a call
// returns.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_RESULTS_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_RESULTS_CUH_

#include "cuda/attention/flag.cuh"
#include "cuda/attention/wide_softmax.cuh"

namespace flashxla::attention {

#if defined(FLASHXLA_HOPPER)

// Four lanes that have x[j] of column j each exchange them: each gets a row, x[i] of lane i.
__device__ inline void TransposeQuad(uint32_t (&x)[4]) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool high = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      uint32_t &low_word = x[i], &high_word = x[i + step];
      const uint32_t other = __shfl_xor_sync(kAllLanes, high ? low_word : high_word, step);
      (high ? low_word : high_word) = other;
    }
  }
}

// Normalizes and writes rows row0 and row0 + 8 of a q tile.
template <typename T, int kDims, int kLift>
__device__ void StoreRows(const Problem& p, const ManyTile& tile, int row0, const RowState& rows,
                          float scale, const float (&out)[kDims / 2]) {
  const int lane = threadIdx.x & 31;
  constexpr float kLower = 1.f / (1 << kLift);
  const float value_scale = p.ValueScale(tile.index, tile.kv_head) * kLower;
  const float sink = p.Sink(tile.head);
  bool exists[2];
  float whole[2];
  T* to[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float row_sum = rows.row_sum[r];
    row_sum += __shfl_xor_sync(kAllLanes, row_sum, 1);
    row_sum += __shfl_xor_sync(kAllLanes, row_sum, 2);
    const int query = tile.first_query + row0 + 8 * r, token = tile.s.first_query + query;
    exists[r] = query < tile.s.num_queries;
    const RowEnd end = {rows.row_max[r] * scale, row_sum * kLower, sink};
    if (exists[r] && lane % 4 == 0) p.StoreLse(token, tile.head, end);
    whole[r] = end.Factor() * value_scale;
    to[r] = reinterpret_cast<T*>(p.out.data) + token * p.out.stride_token +
            tile.head * p.out.stride_head;
  }
  // A lane has 2 of each 8 columns. After the exchange it stores all 8, since the number of stores
  // counts: each takes a cycle for each row.
#pragma unroll
  for (int i = 0; i < kDims / 8; i += 4) {
    const int d = (i + lane % 4) * 8;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* pair = &out[(i + j) * 4 + 2 * r];
        x[j] = Pack<T>(pair[0] * whole[r], pair[1] * whole[r]);
      }
      TransposeQuad(x);
      if (exists[r] && d < p.head_size) {
        *reinterpret_cast<uint4*>(to[r] + d) = make_uint4(x[0], x[1], x[2], x[3]);
      }
    }
  }
}

// Results of parts of a q tile, as a warpgroup has them in its registers.
template <typename S, int kDims>
struct WideParts {
  const WideProblem& w;
  int first, each;  // where those of part 0 are, and from one part to the next

  __device__ WideParts(const WideProblem& problem, const ManyTile& tile, int group)
      : w(problem),
        first(((tile.partial - tile.part) * w.p.num_heads + tile.head) * S::kConsumers + group),
        each(w.p.num_heads * S::kConsumers) {}

  // Writes the result of this part.
  __device__ void Store(int part, int barrier, const RowState& rows,
                        const float (&out)[kDims / 2]) const {
    float4* to = Vectors(part);
#pragma unroll
    for (int i = 0; i < kDims / 8; ++i) {
      const float* x = &out[i * 4];
      to[i * kWarpgroupThreads] = make_float4(x[0], x[1], x[2], x[3]);
    }
    to[kDims / 8 * kWarpgroupThreads] =
        make_float4(rows.row_max[0], rows.row_max[1], rows.row_sum[0], rows.row_sum[1]);
    SyncNamed(barrier, kWarpgroupThreads);
    if (thread() == 0) SetFlag(Flag(part), w.tag);
  }

  // Adds the results of the `count` other parts to that of the last one. scale: see ScoreRule.
  __device__ void Add(int count, int barrier, float scale, RowState& rows,
                      float (&out)[kDims / 2]) const {
    if (thread() < count) AwaitFlag(Flag(thread()), w.tag);
    SyncNamed(barrier, kWarpgroupThreads);
#pragma unroll 1
    for (int part = 0; part < count; ++part) {
      // Past L1, where another block's results may be missing.
      const float4* from = Vectors(part);
      const float4 ends = __ldcg(&from[kDims / 8 * kWarpgroupThreads]);
      const float other_max[2] = {ends.x, ends.y}, other_sum[2] = {ends.z, ends.w};
      float own[2], other[2];  // factors
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float row_max = fmaxf(rows.row_max[r], other_max[r]);
        const float base = row_max == -INFINITY ? 0.f : row_max * scale;
        own[r] = Exp2(rows.row_max[r] * scale - base), other[r] = Exp2(other_max[r] * scale - base);
        rows.row_max[r] = row_max;
        rows.row_sum[r] = rows.row_sum[r] * own[r] + other_sum[r] * other[r];
      }
#pragma unroll
      for (int i = 0; i < kDims / 8; ++i) {
        const float4 x = __ldcg(&from[i * kWarpgroupThreads]);
        float* to = &out[i * 4];
        to[0] = to[0] * own[0] + x.x * other[0], to[1] = to[1] * own[0] + x.y * other[0];
        to[2] = to[2] * own[1] + x.z * other[1], to[3] = to[3] * own[1] + x.w * other[1];
      }
    }
  }

 private:
  __device__ static int thread() { return threadIdx.x % kWarpgroupThreads; }
  __device__ uint64_t* Flag(int part) const { return w.flags + first + part * each; }
  // This thread's.
  __device__ float4* Vectors(int part) const {
    const int64_t place = first + part * each;
    return w.partials + place * WidePartialVectors(kDims) * kWarpgroupThreads + thread();
  }
};

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_RESULTS_CUH_
