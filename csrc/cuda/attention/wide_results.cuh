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
template <typename T, int kDims, int kLift, typename S>
__device__ void StoreRows(const Problem& p, const TileRows<S>& of, const ManyTile& tile,
                          const TileRule& rule, int row0, const RowState& rows,
                          const float (&out)[kDims / 2]) {
  const int lane = threadIdx.x & 31;
  constexpr float kLower = 1.f / (1 << kLift);
  const float scale = rule.rest<S::kAlibi>(), value_scale = rule.value_scale * kLower;
  bool exists[2];
  float whole[2];
  T* to[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float row_sum = rows.row_sum[r];
    row_sum += __shfl_xor_sync(kAllLanes, row_sum, 1);
    row_sum += __shfl_xor_sync(kAllLanes, row_sum, 2);
    const int row = row0 + 8 * r, offset = of.Query(row),
              head = tile.head + row - offset * of.heads();
    const int query = tile.first_query + offset, token = tile.s.first_query + query;
    exists[r] = query < tile.s.num_queries && offset < of.tokens();
    const RowEnd end = {rows.row_max[r] * scale, row_sum * kLower, p.Sink(head)};
    if (exists[r] && lane % 4 == 0) p.StoreLse(token, head, end);
    whole[r] = end.Factor() * value_scale;
    to[r] =
        reinterpret_cast<T*>(p.out.data) + token * p.out.stride_token + head * p.out.stride_head;
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
      if (exists[r] && d < p.v.head_size) StoreGlobal16(to[r] + d, x);
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
        first(((tile.partial - tile.part) * w.work.num_heads +
               (w.work.packs ? tile.kv_head : tile.head)) *
                  S::kConsumers +
              group),
        each(w.work.num_heads * S::kConsumers) {}

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

  // Adds the results of `count` other parts, first, first + step, ..., to that of this one. scale:
  // see TileRule::rest.
  __device__ void Add(int first_part, int step, int count, int barrier, float scale, RowState& rows,
                      float (&out)[kDims / 2]) const {
    if (thread() < count) AwaitFlag(Flag(first_part + thread() * step), w.tag);
    SyncNamed(barrier, kWarpgroupThreads);
    auto vectors = [&](int n) { return Vectors(first_part + n * step); };
    // Past L1, where another block's results may be missing.
    auto ends_of = [&](int n) { return __ldcg(&vectors(n)[kDims / 8 * kWarpgroupThreads]); };
    const float4 first_ends = ends_of(0);
    float row_max[2] = {fmaxf(rows.row_max[0], first_ends.x), fmaxf(rows.row_max[1], first_ends.y)};
#pragma unroll 4
    for (int n = 1; n < count; ++n) {
      const float4 ends = ends_of(n);
      row_max[0] = fmaxf(row_max[0], ends.x), row_max[1] = fmaxf(row_max[1], ends.y);
    }
    float base[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      base[r] = row_max[r] == -INFINITY ? 0.f : row_max[r] * scale;
      const float own = Exp2(rows.row_max[r] * scale - base[r]);
      rows.row_max[r] = row_max[r], rows.row_sum[r] *= own;
#pragma unroll
      for (int i = 0; i < kDims / 8; ++i) out[i * 4 + 2 * r] *= own, out[i * 4 + 2 * r + 1] *= own;
    }
    // Some vectors are on their way while those before are added.
    constexpr int kAtOnce = 8, kPieces = kDims / 8 / kAtOnce;
    float4 next[kAtOnce], next_ends = first_ends;
    auto fetch = [&](int n, int piece) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        next[i] = __ldcg(&vectors(n)[(piece * kAtOnce + i) * kWarpgroupThreads]);
      }
    };
    fetch(0, 0);
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
      const int after = min(n + 1, count - 1);
      const float factor[2] = {Exp2(next_ends.x * scale - base[0]),
                               Exp2(next_ends.y * scale - base[1])};
      rows.row_sum[0] += next_ends.z * factor[0], rows.row_sum[1] += next_ends.w * factor[1];
      next_ends = ends_of(after);
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        float4 now[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) now[i] = next[i];
        piece + 1 < kPieces ? fetch(n, piece + 1) : fetch(after, 0);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          float* to = &out[(piece * kAtOnce + i) * 4];
          to[0] += now[i].x * factor[0], to[1] += now[i].y * factor[0];
          to[2] += now[i].z * factor[1], to[3] += now[i].w * factor[1];
        }
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

// Adds up the results of a q tile's parts. Each part's thread block calls it; true for the last
// one, which has the sum then. The last of some neighbouring parts adds these, and the last of some
// such sums adds them in turn. So blocks only wait for blocks that start before them.
template <typename S, int kDims>
__device__ bool AddParts(const WideProblem& w, const ManyTile& tile, int group, int barrier,
                         float scale, RowState& rows, float (&out)[kDims / 2]) {
  const WideParts<S, kDims> parts(w, tile, group);
  const int part = tile.part, num_parts = tile.num_parts;
  const int together = num_parts > 8 ? 4 : 8;  // a sum of sums takes longer than some parts more
#pragma unroll 1
  for (int step = 1; step < num_parts; step *= together) {
    const int first = part / (step * together) * (step * together);
    if (part + 1 != min(first + step * together, num_parts)) {
      parts.Store(part, barrier, rows, out);
      return false;
    }
    const int count = (part - first) / step;
    if (count > 0) parts.Add(first + step - 1, step, count, barrier, scale, rows, out);
  }
  return true;
}

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_RESULTS_CUH_
