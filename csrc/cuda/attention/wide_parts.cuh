// The parts of wide's q tiles, as thread blocks or a thread block compute them one by one: how
// their results are added up.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_PARTS_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_PARTS_CUH_

#include "cuda/attention/flag.cuh"
#include "cuda/attention/wide_softmax.cuh"

namespace flashxla::attention {

#if defined(FLASHXLA_HOPPER)

// The results of parts of q tiles in the workspace. Each warpgroup has its own, as it has them in
// its registers.
template <typename S, int kDims>
struct WideResults {
  static constexpr int kStep = kWarpgroupThreads;  // from a thread's vector to its next one
  const WideProblem& w;

  // The warpgroups of a q tile that have results.
  __device__ int Groups() const { return S::kFixedParts ? w.result_groups : S::kConsumers; }
  // This thread's vectors of result number `place`, counted by warpgroups.
  __device__ float4* Vectors(int64_t place) const {
    return w.partials + place * WidePartialVectors(kDims) * kStep + threadIdx.x % kStep;
  }

  // Of such vectors. Reads past L1, where another block's may be missing.
  __device__ static float4 Get(const float4* vectors, int i) { return __ldcg(&vectors[i * kStep]); }
  __device__ static void Set(float4* vectors, int i, float4 x) { vectors[i * kStep] = x; }
  __device__ static RowSums Ends(const float4* vectors) {
    const float4 x = Get(vectors, kDims / 8);
    return {{x.x, x.y}, {x.z, x.w}};
  }
  __device__ static void SetEnds(float4* vectors, const RowSums& rows) {
    Set(vectors, kDims / 8,
        make_float4(rows.row_max[0], rows.row_max[1], rows.row_sum[0], rows.row_sum[1]));
  }

  __device__ void Store(int place, const RowSums& rows, const float (&out)[kDims / 2]) const {
    float4* to = Vectors(place);
#pragma unroll
    for (int i = 0; i < kDims / 8; ++i) {
      const float* x = &out[i * 4];
      Set(to, i, make_float4(x[0], x[1], x[2], x[3]));
    }
    SetEnds(to, rows);
  }

  __device__ void Load(int place, RowSums& rows, float (&out)[kDims / 2]) const {
    const float4* from = Vectors(place);
#pragma unroll
    for (int i = 0; i < kDims / 8; ++i) {
      const float4 x = Get(from, i);
      out[i * 4] = x.x, out[i * 4 + 1] = x.y, out[i * 4 + 2] = x.z, out[i * 4 + 3] = x.w;
    }
    rows = Ends(from);
  }
};

// The results of a q tile's parts, and their flags.
template <typename S, int kDims>
struct WideParts {
  const WideProblem& w;
  int first, each;  // the place of part 0, and from one part to the next

  __device__ WideParts(const WideProblem& problem, const ManyTile& tile, int group) : w(problem) {
    const int groups = Results{w}.Groups();
    first = ((tile.partial - tile.part) * w.work.num_heads +
             (w.work.packs ? tile.kv_head : tile.head)) *
                groups +
            group;
    each = w.work.num_heads * groups;
  }

  __device__ int Place(int part) const { return first + part * each; }

  // Writes the result of this part.
  __device__ void Store(int part, int barrier, const RowSums& rows,
                        const float (&out)[kDims / 2]) const {
    Results{w}.Store(Place(part), rows, out);
    Publish(part, barrier);
  }

  // Says that what the warpgroup wrote is there. All its threads must call it.
  __device__ void Publish(int part, int barrier) const {
    SyncNamed(barrier, kWarpgroupThreads);
    if (thread() == 0) SetFlag(Flag(part), w.tag);
  }

  // Waits until all warpgroups wrote what they have, of parts first, first + step, ...
  __device__ void Await(int first_part, int step, int count, int barrier) const {
    if (thread() < count) AwaitFlag(Flag(first_part + thread() * step), w.tag);
    SyncNamed(barrier, kWarpgroupThreads);
  }

  // Adds the results of `count` other parts, first, first + step, ..., to that of this one. scale:
  // see TileRule::rest.
  __device__ void Add(int first_part, int step, int count, int barrier, float scale, RowSums& rows,
                      float (&out)[kDims / 2]) const {
    Await(first_part, step, count, barrier);
    auto vectors = [&](int n) { return Vectors(first_part + n * step); };
    auto ends_of = [&](int n) { return Results::Get(vectors(n), kDims / 8); };
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
      for (int i = 0; i < kAtOnce; ++i) next[i] = Results::Get(vectors(n), piece * kAtOnce + i);
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
  using Results = WideResults<S, kDims>;

  __device__ static int thread() { return threadIdx.x % kWarpgroupThreads; }
  __device__ uint64_t* Flag(int part) const { return w.flags + Place(part); }
  __device__ float4* Vectors(int part) const { return Results{w}.Vectors(Place(part)); }
};

// Adds up the results of a q tile's parts. Each part's thread block calls it; true for the last
// one, which has the sum then. The last of some neighbouring parts adds these, and the last of some
// such sums adds them in turn. So blocks only wait for blocks that start before them.
template <typename S, int kDims>
__device__ bool AddParts(const WideProblem& w, const ManyTile& tile, int group, int barrier,
                         float scale, RowSums& rows, float (&out)[kDims / 2]) {
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

// How a part of the keys is added to the sum of those behind it, with batch_invariant: always with
// these operations, wherever both are. What a row has not seen changes nothing.
struct OrderedSum {
  float of_sum[2], of_part[2];
  bool keeps[2], takes[2];

  // Adds what is known of two rows to `sum`. scale: see TileRule::rest.
  __device__ OrderedSum(RowSums& sum, const RowSums& part, float scale) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float row_max = fmaxf(sum.row_max[r], part.row_max[r]);
      const float base = row_max == -INFINITY ? 0.f : __fmul_rn(row_max, scale);
      of_sum[r] = Exp2(__fmul_rn(sum.row_max[r], scale) - base);
      of_part[r] = Exp2(__fmul_rn(part.row_max[r], scale) - base);
      keeps[r] = part.row_max[r] == -INFINITY, takes[r] = sum.row_max[r] == -INFINITY;
      sum.row_max[r] = row_max;
      sum.row_sum[r] = Both(sum.row_sum[r], part.row_sum[r], r);
    }
  }

  // Of outputs: those of the second row are the last two.
  __device__ float4 Of(float4 sum, float4 part) const {
    return make_float4(One(sum.x, part.x, 0), One(sum.y, part.y, 0), One(sum.z, part.z, 1),
                       One(sum.w, part.w, 1));
  }

 private:
  __device__ float Both(float sum, float part, int r) const {
    return __fmaf_rn(part, of_part[r], __fmul_rn(sum, of_sum[r]));
  }
  __device__ float One(float sum, float part, int r) const {
    return keeps[r] ? sum : takes[r] ? part : Both(sum, part, r);
  }
};

// Adds `count` parts in memory to a sum, which is there, too: from `parts` on, each `step` vectors
// after the one before.
//
// Not inline: the loops of the matrix instructions would have fewer registers.
template <typename Results, int kDims>
__device__ __noinline__ void AddInOrder(float4* sum, const float4* parts, int64_t step, int count,
                                        float scale) {
  RowSums rows = Results::Ends(sum);
  float4 out[kDims / 8];
#pragma unroll
  for (int i = 0; i < kDims / 8; ++i) out[i] = Results::Get(sum, i);
#pragma unroll 1
  for (int n = 0; n < count; ++n, parts += step) {
    const OrderedSum ordered(rows, Results::Ends(parts), scale);
#pragma unroll
    for (int i = 0; i < kDims / 8; ++i) out[i] = ordered.Of(out[i], Results::Get(parts, i));
  }
#pragma unroll
  for (int i = 0; i < kDims / 8; ++i) Results::Set(sum, i, out[i]);
  Results::SetEnds(sum, rows);
}

// The sums of a q tile's rows where they are formed of fixed parts of the keys: see FixedPart. The
// parts are added one after another, the last one first. Who adds them, and when, changes no bit.
template <typename S, int kDims>
class FixedSums {
 public:
  __device__ FixedSums(const WideProblem& w, const ManyTile& tile, int group, float scale)
      : parts_(w, tile, group), results_{w}, tile_(tile), group_(group), scale_(scale) {}

  // At the end of the part that begins with kv tile n, which is in registers. `begun`: the thread
  // block had one before. The block with the q tile's last part adds up its own: then that is in
  // registers. Others leave each where it can be added.
  __device__ void EndPart(int n, bool begun, RowSums& rows, float (&out)[kDims / 2]) const {
    if (!HasRows()) return;
    const int place = IsLast() ? SumPlace() : parts_.Place(NumberOf(n));
    float4* there = results_.Vectors(place);
    if (IsLast() && begun) {
      RowSums sum = Results::Ends(there);
      const OrderedSum ordered(sum, rows, scale_);
      rows = sum;
#pragma unroll
      for (int i = 0; i < kDims / 8; ++i) {
        const float4 x = ordered.Of(Results::Get(there, i), Vector(out, i));
        out[i * 4] = x.x, out[i * 4 + 1] = x.y, out[i * 4 + 2] = x.z, out[i * 4 + 3] = x.w;
      }
      if (tile_.num_parts == 1 && n == tile_.begin / S::kKeys) return;  // that was all
    }
    results_.Store(place, rows, out);
  }

  // After the thread block's parts: adds what other blocks have. True for the block that has the q
  // tile's sum then.
  __device__ bool Finish(int barrier, RowSums& rows, float (&out)[kDims / 2]) const {
    const int others = tile_.num_parts - 1;
    if (others == 0) return true;
    if (!IsLast()) {
      parts_.Publish(tile_.part, barrier);
      return false;
    }
    parts_.Await(0, 1, others, barrier);
    if (!HasRows()) return true;
    const int count = NumberOf(tile_.begin / S::kKeys);
    float4* sum = results_.Vectors(SumPlace());
    const float4* last = results_.Vectors(parts_.Place(count - 1));
    const int64_t step = results_.Vectors(parts_.Place(0)) - results_.Vectors(parts_.Place(1));
    AddInOrder<Results, kDims>(sum, last, step, count, scale_);
    results_.Load(SumPlace(), rows, out);
    return true;
  }

 private:
  using Results = WideResults<S, kDims>;

  __device__ bool IsLast() const { return tile_.part + 1 == tile_.num_parts; }
  __device__ int SumPlace() const {
    return (parts_.w.sums + static_cast<int>(blockIdx.x)) * results_.Groups() + group_;
  }
  // The number of the part of kv tile n among those of the q tile.
  __device__ int NumberOf(int n) const {
    auto index = [](int tile) { return FixedPart::Of(tile, S::kKeys).index; };
    return index(n) - index(tile_.whole_begin / S::kKeys);
  }
  // Whether any row of this warp is stored.
  __device__ bool HasRows() const {
    const TileRows<S> of{parts_.w};
    const int query = of.Query((static_cast<int>(threadIdx.x) - S::kProducerThreads) / 32 * 16);
    return query < of.tokens() && tile_.first_query + query < tile_.s.num_queries;
  }
  __device__ static float4 Vector(const float (&out)[kDims / 2], int i) {
    return make_float4(out[i * 4], out[i * 4 + 1], out[i * 4 + 2], out[i * 4 + 3]);
  }

  const WideParts<S, kDims> parts_;
  const Results results_;
  const ManyTile& tile_;
  const int group_;
  const float scale_;
};

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_PARTS_CUH_
