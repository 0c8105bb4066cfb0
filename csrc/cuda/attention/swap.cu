// swap: sequences with few queries (decode), by split-KV, on Hopper's tensor cores. Keys are the
// rows of the products, queries the columns ("swap AB").
#include <algorithm>
#include <type_traits>

#include "common/tensor_view.h"
#include "cuda/attention/engines.h"
#include "cuda/attention/swap_kernel.cuh"
#include "cuda/attention/tensor_map.h"
#include "cuda/call_tag.h"

namespace flashxla::attention {
namespace {

// Of head sizes above 256: to add up the parts of many rows, or many parts, takes a thread block
// longer than all of large_split's.
const char* WhyNotSwapLarge(const Facts& facts) {
  const Problem& p = facts.problem;
  if (MostRows(p) > kSplitQTileRows) {
    return "head sizes are above 256, and a KV head may have more than 16 rows";
  }
  constexpr int64_t kMostParts = 96;
  const int64_t sequences = std::max<int64_t>(int64_t{p.num_kv_heads} * facts.num_sequences, 1);
  // Whatever GPU there is: programs can be compiled without one.
  const int64_t blocks = kHopper.multiprocessors / sequences;
  if (std::min(facts.capacity / kFewKvTileKeys, blocks) > kMostParts) {
    return "head sizes are above 256, and a sequence may be in more than 96 parts";
  }
  return "";
}

const char* WhyNotSwap(const Facts& facts) {
  const Problem& p = facts.problem;
  const bool large = HasLargeHeads(p);
  if (const char* why = WhyNot16BitDtypes(p); why[0] != '\0') return why;
  if (!LoadedImage().hopper) return WhyNoHopper();
  if (large) {
    if (const char* why = WhyNotSwapLarge(facts); why[0] != '\0') return why;
  }
  if (!AreFewStepsCountable(facts, large)) return "the batch has too many keys for split-KV";
  if (const char* why = WhyNoKeys(p); why[0] != '\0') return why;
  if (!large && !MustCopyFew(p)) return "";
  if (p.kv_unit == 0) {
    return "strides, addresses or head sizes of the keys are not multiples of 4 bytes";
  }
  return p.kv_near ? "" : "threads have to copy the keys, and the cache is too large for that";
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
  w.tag = NewCallTag();
  w.num_blocks = FastDivide(p.few.num_blocks);
  w.q_vectors = ElementSize(p.q_dtype) == 2 && p.q_unit == 16;
  w.out_vectors = p.out_unit == 16;
  if (p.few.copies) {
    LaunchSwapCopied(w, workspace, stream);
    return FLASHXLA_OK;
  }
  w.box_keys = KeysOfBox(p, kFewKvTileKeys);
  const int columns = IsFp8(p.kv_dtype) ? 128 : 64;
  if (!MapCache(p, p.k, columns, w.box_keys, true, &w.k) ||
      !MapCache(p, p.v, columns, w.box_keys, true, &w.v)) {
    return SetError(FLASHXLA_DEVICE_ERROR, "the driver refuses a tensor map of k or v");
  }
  WithShape(p, [&](auto shape) {
    LaunchSwapKernel<typename decltype(shape)::type>(w, workspace, stream);
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
