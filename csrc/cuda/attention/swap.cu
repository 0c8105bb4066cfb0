// swap: sequences with few queries (decode), by split-KV, on Hopper's tensor cores. Keys are the
// rows of the products, queries the columns ("swap AB"). A producer warp fills the stages by TMA, a
// warpgroup computes.
#include <type_traits>

#include "common/tensor_view.h"
#include "cuda/attention/engines.h"
#include "cuda/attention/swap_combine.cuh"
#include "cuda/attention/swap_combine_many.cuh"
#include "cuda/attention/swap_plan.cuh"
#include "cuda/attention/swap_tile.cuh"
#include "cuda/attention/tensor_map.h"
#include "cuda/call_tag.h"

namespace flashxla::attention {
namespace {

#if defined(FLASHXLA_HOPPER)

// Computes the rest of the current q tile of `at`, as far as it is this block's. Each warpgroup has
// kRows rows.
template <typename S, int kRows>
__device__ void ComputeTile(const SwapProblem& w, const SwapShared<S>& shared,
                            const SplitWorkspace& workspace, const FewBlock& block, int kv_head,
                            int warp, Cursor& at, int& stage, uint32_t& parity) {
  SwapTile<S, kRows> tile(shared, warp, at);
  const bool idle = S::kGroups > 1 && tile.first_row >= at.sequence.num_queries * w.p.group_size;
  if (!idle) tile.Begin(w, at, kv_head);
  const int segment = at.step, segment_end = min(at.tile_end, at.end);
#pragma unroll 1
  for (int key = at.first_key(); at.step < segment_end; ++at.step, key += kFewKvTileKeys) {
    WaitBarrier(shared.keys_full(stage), parity);
    auto await_values = [&] {
      WaitBarrier(shared.values_full(stage), parity);
      ZeroValues(shared, stage);
    };
    idle ? await_values() : tile.Step(w.p, stage, key, at.step == segment, await_values);
    Release(shared.empty(stage));
    if (++stage == S::kStages) stage = 0, parity ^= 1;
  }
  const bool whole = segment == at.tile_start && segment_end == at.tile_end;
  const bool back = segment != block.begin;
  if (!idle) {
    tile.End();
    whole
        ? tile.Store(w, at, kv_head)
        : tile.StorePartial(w.p, at, workspace.shape, workspace.partial(kv_head, blockIdx.y, back));
  }
  // The last part needs no flag: its own block combines.
  if (segment_end < at.tile_end) {
    SyncNamed(kSwapConsumers, S::kConsumerThreads);
    if (threadIdx.x == 0) SetFlag(workspace.flag(kv_head, blockIdx.y, back), w.tag);
  }
}

// Computes the block's steps.
template <typename S>
__device__ void SwapConsume(const SwapProblem& w, const SwapShared<S>& shared,
                            const SplitWorkspace& workspace, const SequenceList& sequences,
                            const FewBlock& block, int kv_head, int warp) {
  Cursor at(w.p, sequences, block);
  int stage = 0;
  uint32_t parity = 0;
#pragma unroll 1
  while (true) {  // q tiles
    const int rows = at.sequence.num_queries * w.p.group_size - at.first_row;
    auto compute = [&](auto count) {
      ComputeTile<S, decltype(count)::value>(w, shared, workspace, block, kv_head, warp, at, stage,
                                             parity);
    };
    if (rows <= 8 * S::kGroups) {
      compute(std::integral_constant<int, 8>{});
    } else if constexpr (S::kGroups == 1) {
      compute(std::integral_constant<int, S::kGroupRows>{});
    } else if (rows <= 32) {
      compute(std::integral_constant<int, 16>{});
    } else {
      rows <= 64 ? compute(std::integral_constant<int, 32>{})
                 : compute(std::integral_constant<int, S::kGroupRows>{});
    }
    if (at.step == at.end) return;
    --at.step;
    at.Next(w.p);
  }
}

#endif  // FLASHXLA_HOPPER

template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kThreadBlocks)
    SwapKernel(const __grid_constant__ SwapProblem w, const SplitWorkspace workspace) {
#if defined(FLASHXLA_HOPPER)
  extern __shared__ __align__(1024) char dynamic[];
  const SwapShared<S> shared(dynamic);
  const int kv_head = blockIdx.x;
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0);
  if (!w.p.few_follows) {
    TriggerNext();  // else at the end, as wide does
  } else if (w.p.few_left != nullptr && __ldcg(w.p.few_left) == 0) {
    // It is there: the kernel before this one wrote it before it let this one start.
    WaitForPrevious();
    return;
  }
  if (threadIdx.x == 0) {
    if (shared.address % 1024 != 0) __trap();  // as TMA's swizzle needs it
    PrefetchMap(&w.k), PrefetchMap(&w.v);
    shared.InitBarriers();
  }
  __syncthreads();
  PrefetchInputs(w.p, workspace, kv_head);
  if (!w.p.few_follows) WaitForPrevious();
  SequenceList sequences = w.p.plan.sequences;
  FewBlock block;
  const bool own_plan = S::kMakesPlan && w.p.makes_plan;
  if (own_plan) {
    block = MakeOwnPlan(w, shared, blockIdx.y);
    sequences = shared.sequences();
  } else {
    block = ReadTogether(&w.p.plan.few_blocks[blockIdx.y]);
  }
  const bool works = block.begin < block.end;
  SplitTile ended = {};
  bool combines_many = false;
  if (works && warp < S::kConsumerWarps) {
    ended = Cursor(w.p, sequences, block).Ended(blockIdx.y);
    const int ended_rows = ended.num_queries * w.p.group_size - ended.first_row;
    combines_many = S::kCombinesMany || ended_rows > kMostRowsAtOnce;
  }
  if (warp >= S::kConsumerWarps) {
    if constexpr (S::kMoveRegisters) LowerRegisters<56>();
    if (warp == S::kConsumerWarps && works) SwapProduce(w, shared, sequences, block, kv_head);
    if (warp == S::kThreads / 32 - 1) {
      const int first = blockIdx.y * gridDim.x + kv_head, count = gridDim.x * gridDim.y;
      own_plan ? StoreIdleTokens(w.p, shared.sequences(), first, count)
               : StoreIdleTokens(w.p, first, count);
    }
  } else {
    if constexpr (S::kMoveRegisters) RaiseRegisters<224>();
    if (works) {
      SwapConsume(w, shared, workspace, sequences, block, kv_head, warp);
      // The usual way's instructions come first: they take long to arrive.
      if (__builtin_expect(combines_many, S::kCombinesMany)) {
        CombineManyRows(w, shared, workspace, kv_head, warp, ended);
      }
    }
  }
  if constexpr (!S::kCombinesMany) {
    const bool combines = ended.num_parts > 0 && !combines_many, warms = warp >= S::kConsumerWarps;
    if (works && (combines || warms)) CombineParts(w, shared, workspace, kv_head, warp, ended);
  }
  if (w.p.few_follows) WaitForPrevious();
#endif
}

const char* WhyNotSwap(const Facts& facts) {
  const Problem& p = facts.problem;
  if (const char* why = WhyNot16Bit(p); why[0] != '\0') return why;
  if (!LoadedImage().hopper) return WhyNoHopper();
  if (!AreFewStepsCountable(facts, false)) return "the batch has too many keys for split-KV";
  return WhyNoCacheBoxes(p, 8);
}

// Calls body(Type<SwapShape>) with the shape that serves a call.
template <typename Body>
void WithShape(const Problem& p, Body&& body) {
  auto with_rows = [&](auto product, auto out, auto dims, auto fp8) {
    using Product = typename decltype(product)::type;
    using Out = typename decltype(out)::type;
    constexpr int kDims = decltype(dims)::value;
    constexpr bool kFp8 = decltype(fp8)::value;
    if constexpr (kDims <= 128 && !kFp8) {
      if (p.few.many_short) {
        return body(
            Type<SwapShape<Product, Out, kDims, kFp8, kSplitQTileRows, SwapKind::kManyShort>>{});
      }
    }
    if (p.few.q_tile_rows == kSplitQTileRows) {
      return body(Type<SwapShape<Product, Out, kDims, kFp8, kSplitQTileRows>>{});
    }
    if constexpr (kDims <= 128) {
      if (p.few.q_tile_rows == kSwapMidRows) {
        return body(Type<SwapShape<Product, Out, kDims, kFp8, kSwapMidRows>>{});
      }
    }
    body(Type<SwapShape<Product, Out, kDims, kFp8, kSwapQTileRows>>{});
  };
  const int dims = p.LargerHeadSize();
  auto with_dims = [&](auto out) {
    if (IsFp8(p.kv_dtype)) {
      const Type<__half> product;
      if (dims <= 128) {
        return with_rows(product, out, std::integral_constant<int, 128>{}, std::true_type{});
      }
      return with_rows(product, out, std::integral_constant<int, 256>{}, std::true_type{});
    }
    const std::false_type fp8;
    if (p.few.heads_together > 1) {
      using Out = typename decltype(out)::type;
      auto with_pairs = [&](auto kind) {
        body(Type<SwapShape<Out, Out, 128, false, kSplitQTileRows, decltype(kind)::value>>{});
      };
      return p.k.head_size == 80
                 ? with_pairs(std::integral_constant<SwapKind, SwapKind::kPairsOf80>{})
                 : with_pairs(std::integral_constant<SwapKind, SwapKind::kPairsOf96>{});
    }
    if (dims <= 64) return with_rows(out, out, std::integral_constant<int, 64>{}, fp8);
    if (dims <= 128) return with_rows(out, out, std::integral_constant<int, 128>{}, fp8);
    with_rows(out, out, std::integral_constant<int, 256>{}, fp8);
  };
  p.out_dtype == FLASHXLA_F16 ? with_dims(Type<__half>{}) : with_dims(Type<__nv_bfloat16>{});
}

flashxla_status LaunchSwap(const Problem& p, void* workspace, cudaStream_t stream) {
  SwapProblem w = {};
  w.p = p;
  w.box_keys = KeysOfBox(p, kFewKvTileKeys);
  w.tag = NewCallTag();
  w.num_blocks = FastDivide(p.few.num_blocks);
  w.q_vectors = ElementSize(p.q_dtype) == 2 && p.k.head_size % 8 == 0 && AreVectors(p.q, p.q_dtype);
  w.out_vectors = p.v.head_size % 8 == 0 && AreVectors(p.out, p.out_dtype);
  const int columns = IsFp8(p.kv_dtype) ? 128 : 64;
  if (!MapCache(p, p.k, columns, w.box_keys, true, &w.k) ||
      !MapCache(p, p.v, columns, w.box_keys, true, &w.v)) {
    return SetError(FLASHXLA_DEVICE_ERROR, "the driver refuses a tensor map of k or v");
  }
  WithShape(p, [&](auto shape) {
    using S = typename decltype(shape)::type;
    auto* kernel = SwapKernel<S>;
    LaunchDependent(kernel, dim3(p.num_kv_heads, p.few.num_blocks), S::kThreads, S::kBytes, stream,
                    w, SplitWorkspace(p, workspace));
  });
  return FLASHXLA_OK;
}

}  // namespace

const Engine kSwapEngine = {"swap",
                            "Hopper's tensor cores (wgmma, TMA), split-KV",
                            kFew,
                            WhyNotSwap,
                            SplitWorkspaceBytes,
                            LaunchSwap};

}  // namespace flashxla::attention
