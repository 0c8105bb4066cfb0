// wide's consumer warpgroups: they overlap the scores of the next kv tile with the softmax and
// values of the last.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_CONSUMER_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_CONSUMER_CUH_

#include "cuda/attention/matrix_product.cuh"
#include "cuda/attention/wide_fp8.cuh"
#include "cuda/attention/wide_odd.cuh"
#include "cuda/attention/wide_parts.cuh"
#include "cuda/attention/wide_results.cuh"
#include "cuda/attention/wide_tiles.cuh"

namespace flashxla::attention {

#if defined(FLASHXLA_HOPPER)

// ptxas moves a wait for matrix instructions up, in front of arithmetic that is there to overlap
// with them. A branch that depends on the arithmetic keeps it above. It is never taken: a sum of
// weights is not negative.
__device__ inline void KeepAbove(float sum) {
  asm volatile(
      "{\n"
      ".reg .pred never;\n"
      "again:\n"
      "setp.lt.f32 never, %0, 0f00000000;\n"
      "@!never bra done;\n"
      "nanosleep.u32 20;\n"
      "bra again;\n"
      "done:\n"
      "}\n" ::"f"(sum));
}

// Flips the signs of 16 bytes in shared memory.
template <uint32_t kSigns>
__device__ void NegateVector(uint32_t at) {
  asm volatile(
      "{.reg .b32 a, b, c, d; ld.shared.v4.b32 {a, b, c, d}, [%0]; xor.b32 a, a, %1; "
      "xor.b32 b, b, %1; xor.b32 c, c, %1; xor.b32 d, d, %1; st.shared.v4.b32 [%0], {a, b, c, "
      "d};}" ::"r"(at),
      "n"(kSigns)
      : "memory");
}

// The consumer warpgroups. Product: what the products of queries and keys take.
template <typename Product, typename Out, int kDims, typename S>
__device__ void Consume(const WideProblem& w, const WideShared<S>& shared) {
  constexpr int kKeys = S::kKeys, kValueDims = S::kValueDims;
  constexpr int kLift = S::kDirect ? 0 : kLiftLog2;
  // Of weights and values. float16 holds all fp8 numbers, and takes half as long to widen to.
  using Weight = std::conditional_t<S::kWidened, __half, Product>;
  // A matrix instruction sums over 32 bytes: of dims for scores, of keys for values.
  constexpr int kStepElements = 32 / S::kElementBytes;
  constexpr int kDimSteps = kDims / kStepElements, kKeySteps = kKeys / kStepElements;
  // The warpgroups take turns at the tensor cores: one multiplies during the other's softmax.
  constexpr bool kTurns = kDims >= 128 && S::kConsumers == 2;
  // Without turns, a warpgroup's softmax is to overlap with its own products of values.
  constexpr bool kOverlap = !kTurns && S::kDirect;
  // Whether sums are scaled only where that makes a difference. Else it takes less time to scale
  // them always than to ask.
  constexpr bool kAsks = kOverlap || !S::kDirect || S::kAlibi || kDims > 128;
  // Whether that is seldom, since weights may be above 1 (kLazyLog2). Those of e4m3 have no room.
  constexpr bool kLazy = kAsks && !S::kFp8;
  constexpr int kTurnBarrier = 2, kZeroBarrier = 1, kGroupBarrier = 4;
  constexpr uint32_t kSigns = S::kFp8 ? 0x80808080 : 0x80008000;  // of the queries in 32 bits
  const Problem& p = w.p;
  const int lane = threadIdx.x & 31;
  const int thread = threadIdx.x - S::kProducerThreads;
  const int group = FromFirstLane(thread / kWarpgroupThreads);
  const int row0 = group * 64 + threadIdx.x % kWarpgroupThreads / 32 * 16 + lane / 4;
  PipelineState<S::kStages> keys;
  PipelineState<S::kValueStages> values;
  PipelineState<S::kQueryStages> queries;
  if (kTurns && group == 1) ArriveNamed(kTurnBarrier, 2 * kWarpgroupThreads);

  WideTiles<S> tiles(shared);
  for (ManyTile tile; tiles.Next(&tile); tiles.Done()) {
    const Sequence& s = tile.s;
    const TileRows<S> tile_rows{w};
    WaitBarrier(shared.queries_full(queries.stage), queries.parity);
    const TileRule rule = tiles.ReadRule();
    RowState rows(tile_rows, tile, rule, group, row0);
    float out[kValueDims / 2], score[kKeys / 2], factor[2];
    uint32_t weights[kKeySteps][4];
#pragma unroll
    for (int i = 0; i < kValueDims / 2; ++i) out[i] = 0.f;

    uint32_t q_fragments[S::kQueriesInRegisters ? kDimSteps : 1][4];
    auto start_scores = [&](int stage) {
      const uint64_t all_keys = MatrixDescriptor(shared.keys(stage), 0);
      const uint64_t all_queries =
          MatrixDescriptor(shared.queries(queries.stage) + group * 64 * kWideRowBytes, 0);
      FenceMatrix();
#pragma unroll
      for (int k = 0; k < kDimSteps; ++k) {
        const int block = k / 4, step = k % 4 * 32;
        const uint64_t b = After(all_keys, block * kKeys * kWideRowBytes + step);
        if constexpr (S::kQueriesInRegisters) {
          MatrixProduct<Product, kKeys>::Start(score, q_fragments[k], b, k > 0);
        } else {
          MatrixProduct<Product, kKeys>::Start(
              score, After(all_queries, block * S::kQTileRows * kWideRowBytes + step), b, k > 0);
        }
      }
      CommitMatrix();
    };
    auto start_values = [&](int stage) {
      const uint64_t all_values =
          MatrixDescriptor(shared.values(stage), S::kFp8 ? 0 : kKeys * kWideRowBytes);
      FenceMatrix();
#pragma unroll
      for (int k = 0; k < kKeySteps; ++k) {
        const int step = k * (S::kFp8 ? 32 : 16 * kWideRowBytes);  // turned values: [dims, keys]
#pragma unroll
        for (int part = 0; part < S::kOutParts; ++part) {
          MatrixProduct<Weight, kValueDims / S::kOutParts>::template Start<!S::kFp8>(
              reinterpret_cast<float (&)[kValueDims / 2 / S::kOutParts]>(
                  out[part * kValueDims / 2 / S::kOutParts]),
              weights[k],
              After(all_values,
                    part * S::kValueBlocks / S::kOutParts * kKeys * kWideRowBytes + step),
              true);
        }
      }
      CommitMatrix();
    };
    // Waits for kv tile n's values, and zeroes those of keys that do not exist: they may hold NaN,
    // and 0 times NaN is not 0. (Who turned values did that.) Boxes without any key are zero.
    auto wait_values = [&](int n) {
      WaitBarrier(shared.values_full(values.stage), values.parity);
      if constexpr (S::kFp8) return;
      const int low = max(s.first_key - n * kKeys, 0), high = min(s.num_keys - n * kKeys, kKeys);
      if (low == 0 && high == kKeys) return;
      const int end = p.block_table.data == nullptr ? kKeys : (high + w.box_keys - 1) & -w.box_keys;
      if (low == 0 && high == end) return;
      constexpr int kVectors = kWideRowBytes / 16, kOfKey = kVectors * S::kValueBlocks;
      constexpr int kAtOnce = S::kConsumerThreads / kOfKey;  // keys
      int of_block;  // read anew: no register of the loops around is to hold what follows from it
      asm volatile("mov.u32 %0, %%tid.x;" : "=r"(of_block));
      const int mine = of_block - S::kProducerThreads, vector = mine % kOfKey;
#pragma unroll 1
      for (int i = mine / kOfKey; i < low + end - high; i += kAtOnce) {
        const int key = i < low ? i : high + i - low;
        const uint32_t at = shared.values(values.stage) +
                            (vector / kVectors * kKeys + key) * kWideRowBytes +
                            vector % kVectors * 16;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
      }
      FenceProxy();
      SyncNamed(kZeroBarrier, S::kConsumerThreads);
    };
    auto pack_weights = [&] {
#pragma unroll
      for (int k = 0; k < kKeySteps; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (S::kFp8) {
            const float* x = &score[k * 16 + i / 2 * 8 + i % 2 * 2];
            weights[k][i] = PackFp8(x[0], x[1], x[4], x[5]);
          } else {
            weights[k][i] = Pack<Weight>(score[k * 8 + 2 * i], score[k * 8 + 2 * i + 1]);
          }
        }
      }
    };

    const int first = tile.begin / kKeys;
    int n = (tile.end + kKeys - 1) / kKeys - 1;
    // Whether the q tile's keys are in several fixed parts.
    const bool cuts = S::kFixedParts && p.batch_invariant &&
                      (tile.num_parts > 1 || FixedPart::Of(max(n, 0), kKeys).first > first);
    if constexpr (S::kWidensQueries) {
      const uint32_t mine = shared.queries(queries.stage) + group * 64 * kWideRowBytes;
      p.q_dtype == FLASHXLA_F8E5M2 ? WidenQueries<Out, true, S>(mine, kGroupBarrier + group)
                                   : WidenQueries<Out, false, S>(mine, kGroupBarrier + group);
    }
    if constexpr (S::kOddHeads) {
      LoadOddQueries<kDims, Out>(p, tile_rows, tile, group, shared.queries(queries.stage),
                                 kGroupBarrier + group);
    }
    if (rule.negative) {
      for (int i = threadIdx.x % kWarpgroupThreads; i < 64 * S::kBlocks * kWideRowBytes / 16;
           i += kWarpgroupThreads) {
        constexpr int kVectors = 64 * kWideRowBytes / 16;  // of a warpgroup, in a block of columns
        NegateVector<kSigns>(shared.queries(queries.stage) +
                             i / kVectors * S::kQTileRows * kWideRowBytes +
                             (group * kVectors + i % kVectors) * 16);
      }
      FenceProxy();
      SyncNamed(kGroupBarrier + group, kWarpgroupThreads);
    }
    if constexpr (S::kQueriesInRegisters) {
      const int row = row0 - lane / 4 + lane % 16;
#pragma unroll
      for (int k = 0; k < kDimSteps; ++k) {
        const int chunk = k % 4 * 2 + lane / 16;
        LoadMatrices(q_fragments[k], shared.queries(queries.stage) +
                                         k / 4 * S::kQTileRows * kWideRowBytes +
                                         row * kWideRowBytes + (chunk ^ row % 8) * 16);
      }
      Release(shared.queries_empty(queries.stage));
    }
    const int group_query = tile.first_query + tile_rows.Query(group * 64);
    // A warpgroup without rows. Where q tiles are short and many, that is not worth the question.
    const bool idle = (S::kConsumers > 2 || S::kDivides) && group_query >= s.num_queries;
    if constexpr (S::kConsumers > 2 || S::kDivides) {
      // Of kv tiles that none of its rows sees a warpgroup only says that it is done with them, and
      // passes its turn on. Those that take turns do so only where they have no rows at all, as do
      // those that have a result of each part.
      int end = idle ? 0 : tile.end;
      if (!kTurns && !idle && !cuts) {
        end = rule.Visible(tile_rows.Query(group * 64 + 63)).end;
      }
      end = FromFirstLane(end);
      for (; n >= first && n * kKeys >= end; --n) {
        WaitBarrier(shared.keys_full(keys.stage), keys.parity);
        if (kTurns) {
          SyncNamed(kTurnBarrier + group, 2 * kWarpgroupThreads);
          ArriveNamed(kTurnBarrier + 1 - group, 2 * kWarpgroupThreads);
        }
        Release(shared.keys_empty(keys.stage));
        keys.Next();
        wait_values(n);
        Release(shared.values_empty(values.stage));
        values.Next();
      }
    }
    if (!S::kQueriesInRegisters && n < first) Release(shared.queries_empty(queries.stage));
    bool begun = false;  // whether there were parts before the present one
    while (n >= first) {
      const int part_first = cuts ? max(FixedPart::Of(n, kKeys).first, first) : first;
      WaitBarrier(shared.keys_full(keys.stage), keys.parity);
      if (kTurns) SyncNamed(kTurnBarrier + group, 2 * kWarpgroupThreads);
      start_scores(keys.stage);
      if (kTurns) ArriveNamed(kTurnBarrier + 1 - group, 2 * kWarpgroupThreads);
      WaitMatrix<0>();
      Pin(score);
      Release(shared.keys_empty(keys.stage));
      keys.Next();
      OnlineSoftmax<S, kLift, kLazy>(score, rows, rule, n * kKeys, factor);
      pack_weights();
      for (--n; n >= part_first; --n) {
        WaitBarrier(shared.keys_full(keys.stage), keys.parity);
        wait_values(n + 1);
        if (kTurns) SyncNamed(kTurnBarrier + group, 2 * kWarpgroupThreads);
        start_scores(keys.stage);
        start_values(values.stage);
        if (kTurns) ArriveNamed(kTurnBarrier + 1 - group, 2 * kWarpgroupThreads);
        WaitMatrix<1>();
        Pin(score);
        Release(shared.keys_empty(keys.stage));
        keys.Next();
        OnlineSoftmax<S, kLift, kLazy>(score, rows, rule, n * kKeys, factor);
        if (kOverlap) KeepAbove(fminf(rows.row_sum[0], rows.row_sum[1]));
        WaitMatrix<0>();
        Pin(out);
        Release(shared.values_empty(values.stage));
        values.Next();
        if (!kAsks || __any_sync(kAllLanes, factor[0] != 1.f || factor[1] != 1.f)) {
#pragma unroll
          for (int i = 0; i < kValueDims / 2; ++i) out[i] *= factor[i / 2 % 2];
        }
        pack_weights();
      }
      const bool ends = !cuts || n < first;
      if (!S::kQueriesInRegisters && ends) Release(shared.queries_empty(queries.stage));
      wait_values(part_first);
      start_values(values.stage);
      WaitMatrix<0>();
      Pin(out);
      Release(shared.values_empty(values.stage));
      values.Next();
      if constexpr (S::kFixedParts) {
        if (!cuts) break;
        const ManyTile now = tiles.Read();
        const float scale = rule.template rest<S::kAlibi>();
        FixedSums<S, kValueDims>(w, now, group, scale).EndPart(part_first, begun, rows, out);
        if (ends) break;
        begun = true;
        static_cast<RowSums&>(rows) = RowSums{};
#pragma unroll
        for (int i = 0; i < kValueDims / 2; ++i) out[i] = 0.f;
      } else {
        break;
      }
    }
    queries.Next();

    tile = tiles.Read();
    if constexpr (S::kDivides) {
      if (idle || tile.num_parts == 0) continue;
      const float scale = rule.template rest<S::kAlibi>();
      const int barrier = kGroupBarrier + group;
      bool whole = true;
      if constexpr (S::kFixedParts) {
        if (cuts)
          whole = FixedSums<S, kValueDims>(w, tile, group, scale).Finish(barrier, rows, out);
      }
      if constexpr (S::kAnyParts) {
        if (!cuts) whole = AddParts<S, kValueDims>(w, tile, group, barrier, scale, rows, out);
      }
      if (!whole) continue;
    }
    StoreRows<Out, kValueDims, kLift>(p, tile_rows, tile, tiles.ReadRule(), row0, rows, out);
  }
}

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_CONSUMER_CUH_
