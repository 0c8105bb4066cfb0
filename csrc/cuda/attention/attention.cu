// Softmax attention over ragged batches: the C ABI's functions.
#include <algorithm>
#include <cinttypes>

#include "common/error.h"
#include "common/tensor_view.h"
#include "cuda/attention/dispatch.cuh"
#include "cuda/attention/engines.h"
#include "cuda/attention/split.cuh"
#include "cuda/check.h"
#include "flashxla/attention.h"

namespace flashxla {
namespace attention {
namespace {

constexpr int64_t kWorkspaceAlignment = 256;

int64_t RoundUp(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

PlanLayout LayoutOf(const flashxla_attention_args& args) {
  return PlanLayout(args.cu_seqlens_q.shape[0] - 1, args.q.shape[0]);
}

int64_t PartialBytes(const flashxla_attention_args& args, const Problem& p, int64_t engines) {
  if (!(engines & kUseSplit)) return 0;
  const int64_t blocks = int64_t{p.num_kv_heads} * SplitBlocksOf(engines);
  const int64_t floats = 2 * kSplitRows * (DimsBucket(args.q.shape[2]) + 2);
  return RoundUp(blocks * (floats * int64_t{sizeof(float)} + int64_t{sizeof(SplitMerge)}),
                 kWorkspaceAlignment);
}

// 16-bit products are exact enough for queries of at most 16 bits.
bool HasTensorCores(const flashxla_attention_args& args) { return args.q.dtype != FLASHXLA_F32; }

PerHead HeadsOf(const flashxla_tensor& t) {
  const ScaleView view(t);
  return {view.data, view.stride_seq, view.stride_head};
}

// The number of the last vector fits 32 bits: 64 GiB.
bool IsNear(const Cache& c, const CacheView& view, int64_t size) {
  const int64_t last =
      (view.num_blocks - 1) * c.stride_block + (view.block_size - 1) * c.stride_token;
  return c.stride_block >= 0 && c.stride_token >= 0 && last * size / 16 < (int64_t{1} << 32);
}

Cache CacheOf(const CacheView& view) {
  return {view.data, view.stride_block, view.stride_token, view.stride_head, view.stride_dim};
}

Rows RowsOf(const flashxla_tensor& t) {
  return {static_cast<char*>(t.data), t.stride[0], t.stride[1], t.stride[2]};
}

void ViewKeys(const flashxla_attention_args& args, CacheView* k, CacheView* v) {
  if (args.block_table.data) {
    ViewCache(args.k, args.v, args.layout, k, v);
    return;
  }
  auto view = [](const flashxla_tensor& t) {
    CacheView c;
    c.data = static_cast<char*>(t.data);
    c.num_blocks = 1, c.block_size = t.shape[0], c.stride_token = t.stride[0];
    c.num_heads = t.shape[1], c.stride_head = t.stride[1];
    c.head_size = t.shape[2], c.stride_dim = t.stride[2];
    return c;
  };
  *k = view(args.k), *v = view(args.v);
}

bool Aligned(const Cache& c, int64_t size) {
  constexpr int64_t kVector = 16;
  return c.stride_dim == 1 && reinterpret_cast<uintptr_t>(c.data) % kVector == 0 &&
         c.stride_block * size % kVector == 0 && c.stride_token * size % kVector == 0 &&
         c.stride_head * size % kVector == 0;
}

bool InPairs(const Rows& r) {
  return r.stride_dim == 1 && r.stride_head % 2 == 0 && r.stride_token % 2 == 0 &&
         reinterpret_cast<uintptr_t>(r.data) % 4 == 0;
}

// Everything but the plan.
Problem MakeProblem(const flashxla_attention_args& args) {
  Problem p = {};
  CacheView k, v;
  ViewKeys(args, &k, &v);
  p.q = RowsOf(args.q), p.out = RowsOf(args.out);
  p.lse = static_cast<float*>(args.lse.data);
  p.lse_stride_head = args.lse.stride[0], p.lse_stride_token = args.lse.stride[1];
  p.k = CacheOf(k), p.v = CacheOf(v);
  p.block_table = static_cast<const int32_t*>(args.block_table.data);
  p.table_stride_sequence = args.block_table.stride[0];
  p.table_stride_page = args.block_table.stride[1];
  p.num_tokens = static_cast<int32_t>(args.q.shape[0]);
  p.num_heads = static_cast<int32_t>(args.q.shape[1]);
  p.head_size = static_cast<int32_t>(args.q.shape[2]);
  p.num_kv_heads = static_cast<int32_t>(k.num_heads);
  p.group_size = p.num_heads / std::max(p.num_kv_heads, 1);
  p.num_blocks = static_cast<int32_t>(k.num_blocks);
  p.block_size = static_cast<int32_t>(k.block_size);
  p.block_shift = -1;
  for (int shift = 0; shift < 31; ++shift) {
    if (p.block_size == 1 << shift) p.block_shift = shift;
  }
  p.window_left = static_cast<int32_t>(args.window_left);
  p.window_right = args.causal ? 0 : static_cast<int32_t>(args.window_right);
  p.q_dtype = static_cast<int32_t>(args.q.dtype);
  p.kv_dtype = static_cast<int32_t>(args.kv_dtype);
  p.out_dtype = args.q.dtype == FLASHXLA_F32 || args.q.dtype == FLASHXLA_F16
                    ? static_cast<int32_t>(args.q.dtype)
                    : FLASHXLA_BF16;
  p.sink_dtype = static_cast<int32_t>(args.sinks.dtype);
  p.softmax_scale = static_cast<float>(args.softmax_scale);
  p.softcap = static_cast<float>(args.softcap);
  p.q_descale = HeadsOf(args.q_descale);
  p.k_descale = HeadsOf(args.k_descale);
  p.v_descale = HeadsOf(args.v_descale);
  p.alibi_slopes = HeadsOf(args.alibi_slopes);
  p.sinks = args.sinks.data;
  p.sinks_stride = args.sinks.stride[0];
  const int64_t size = ElementSize(args.kv_dtype);
  p.kv_vectors = p.head_size * size % 16 == 0 && Aligned(p.k, size) && Aligned(p.v, size);
  p.kv_near = IsNear(p.k, k, size) && IsNear(p.v, v, size);
  p.q_pairs = ElementSize(p.q_dtype) == 2 && p.head_size % 2 == 0 && InPairs(p.q);
  p.out_pairs = ElementSize(p.out_dtype) == 2 && p.head_size % 2 == 0 && InPairs(p.out);
  return p;
}

flashxla_attention_plan_args PlanArgs(const flashxla_attention_args& args, const Problem& p,
                                      int64_t engines, int32_t* plan) {
  flashxla_attention_plan_args plan_args = {};
  plan_args.cu_seqlens_q = args.cu_seqlens_q;
  plan_args.cu_seqlens_k = args.cu_seqlens_k;
  plan_args.seqused_k = args.seqused_k;
  plan_args.leftpad_k = args.leftpad_k;
  plan_args.block_table = args.block_table;
  plan_args.num_seqs = args.num_seqs;
  plan_args.plan.data = plan;
  plan_args.engines = engines;
  plan_args.num_tokens = p.num_tokens;
  plan_args.num_heads = p.num_heads;
  plan_args.num_kv_heads = p.num_kv_heads;
  plan_args.num_blocks = p.num_blocks;
  plan_args.block_size = p.block_size;
  plan_args.causal = args.causal;
  plan_args.window_left = args.window_left;
  plan_args.window_right = args.window_right;
  return plan_args;
}

bool IsQueryDtype(int64_t dtype) {
  return dtype == FLASHXLA_F32 || dtype == FLASHXLA_F16 || dtype == FLASHXLA_BF16 || IsFp8(dtype);
}

// What the kernels count in 32 bits.
flashxla_status CheckSizes(const flashxla_attention_args& args) {
  if (args.block_table.data ? args.seqused_k.data == nullptr : args.cu_seqlens_k.data == nullptr) {
    return SetError(FLASHXLA_INVALID_ARGUMENT, args.block_table.data
                                                   ? "paged attention needs seqused_k"
                                                   : "dense attention needs cu_seqlens_k");
  }
  CacheView k, v;
  ViewKeys(args, &k, &v);
  const int64_t tokens = args.q.shape[0], heads = args.q.shape[1], head_size = args.q.shape[2];
  if (!IsQueryDtype(args.q.dtype) || !IsQueryDtype(args.kv_dtype) || head_size < 1 ||
      head_size > kMaxHeadSize || k.num_heads < 1 || heads % k.num_heads != 0) {
    return SetError(FLASHXLA_INVALID_ARGUMENT, "unsupported dtype, head size or head count");
  }
  constexpr int64_t kMost = INT32_MAX - (1 << 16);  // tiles are rounded up
  const int64_t sequences = args.cu_seqlens_q.shape[0] - 1;
  const int64_t keys = args.block_table.data ? args.block_table.shape[1] : 1;  // blocks of a row
  auto refuse = [](const char* what, int64_t got) {
    return SetError(FLASHXLA_INVALID_ARGUMENT, "%s: got %" PRId64 "; accepted: at most %" PRId64,
                    what, got, kMost);
  };
  // Products of two numbers below 2^31 do not overflow 64 bits.
  if (tokens > kMost || tokens * heads > kMost)
    return refuse("q: tokens times heads", tokens * heads);
  if (sequences > kMost || sequences * heads > kMost) {
    return refuse("cu_seqlens_q: sequences times heads", sequences * heads);
  }
  if (k.num_blocks > kMost) return refuse("k: blocks", k.num_blocks);
  if (k.block_size > kMost) return refuse("k: tokens of a block", k.block_size);
  if (keys > kMost || keys * k.block_size > kMost) {
    return refuse("block_table: room for tokens", keys * k.block_size);
  }
  return FLASHXLA_OK;
}

// The engines of a plan are chosen before the addresses are known, perhaps on another machine.
flashxla_status CheckPlanned(const Problem& p, int64_t engines) {
  const char* why = engines & kUseWide ? WhyNotWide(p) : "";
  if (why[0] == '\0') return FLASHXLA_OK;
  if (!LoadedImage().hopper) {
    return SetError(FLASHXLA_INVALID_ARGUMENT, "the program was compiled for a Hopper GPU: %s",
                    WhyNoHopper());
  }
  auto misaligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 != 0; };
  const char* which = misaligned(p.q.data) ? "q" : misaligned(p.k.data) ? "k" : "v";
  if (!misaligned(p.q.data) && !misaligned(p.k.data) && !misaligned(p.v.data)) {
    return SetError(FLASHXLA_INTERNAL, "the program was compiled for another call: %s", why);
  }
  return SetError(FLASHXLA_INVALID_ARGUMENT,
                  "%s starts at an address that is no multiple of 16 bytes, for which the program "
                  "was not compiled",
                  which);
}

flashxla_status Attend(const flashxla_attention_args& args, const flashxla_context* context) {
  if (const flashxla_status status = CheckSizes(args); status != FLASHXLA_OK) return status;
  if (const flashxla_status status = CheckAttention(args, context); status != FLASHXLA_OK) {
    return status;
  }
  Problem p = MakeProblem(args);
  if (p.num_tokens == 0 || p.num_heads == 0) return FLASHXLA_OK;
  auto* plan = static_cast<int32_t*>(args.plan.data);
  // A plan goes with the engines that it was made for.
  const int64_t engines = plan ? args.engines : ChooseEngines(args).engines;
  if (plan) {
    if (const flashxla_status status = CheckPlanned(p, engines); status != FLASHXLA_OK) {
      return status;
    }
  }
  const PlanLayout layout = LayoutOf(args);
  const int64_t partial_bytes = PartialBytes(args, p, engines);
  const int64_t needed = partial_bytes + (plan ? 0 : layout.words() * 4);
  if (args.workspace.shape[0] < needed) {
    return SetError(FLASHXLA_INVALID_ARGUMENT,
                    "workspace has %" PRId64 " bytes, %" PRId64 " are needed",
                    args.workspace.shape[0], needed);
  }
  auto* partials = static_cast<float*>(args.workspace.data);
  const cudaStream_t stream = StreamOf(context);
  if (plan == nullptr) {
    plan = reinterpret_cast<int32_t*>(static_cast<char*>(args.workspace.data) + partial_bytes);
    LaunchPlan(PlanArgs(args, p, engines, plan), stream);
  }
  p.plan = PlanView(plan, layout);
  if (engines & kUseSplit) LaunchSplit(p, engines, partials, stream);
  if ((engines & kUseWide) && !LaunchWide(p, stream)) {
    return SetError(FLASHXLA_DEVICE_ERROR, "the driver refuses a tensor map of q, k or v");
  }
  if (!(engines & kSplitAll)) {
    HasTensorCores(args) ? LaunchTile(p, stream) : LaunchSimt(p, stream);
  }
  LaunchFinish(p, engines, partials, stream);
  return LaunchStatus("attention");
}

// The steps of kSplit's line at most: groups of keys for each tile of rows.
double MaxSplitSteps(const flashxla_attention_args& args, int64_t capacity, int64_t group,
                     int64_t max_rows) {
  const double sequences = static_cast<double>(args.cu_seqlens_q.shape[0] - 1);
  const double rows = static_cast<double>(args.q.shape[0]) * group;
  const double tiles_of_one = (max_rows + kSplitRows - 1) / kSplitRows;
  const double tiles = std::min(sequences * tiles_of_one, rows / kSplitRows + sequences);
  return tiles * static_cast<double>(capacity / kSplitKeys + 2);
}

}  // namespace

Choice ChooseEngines(const flashxla_attention_args& args) {
  Choice choice = {};
  if (!HasTensorCores(args)) {
    choice.reason = "float32 queries: CUDA cores";
    return choice;
  }
  const Problem problem = MakeProblem(args);
  const int64_t capacity =
      args.block_table.data ? args.block_table.shape[1] * problem.block_size : args.k.shape[0];
  const int64_t longest = std::min(args.max_seqlen_q, args.q.shape[0]) * problem.group_size;
  const int64_t split_rows = MaxSplitRows(problem.group_size);
  const bool countable =
      MaxSplitSteps(args, capacity, problem.group_size, split_rows) < double{INT32_MAX};
  const bool fits = DeviceAttribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, kHopper.shared) >=
                    SplitSharedBytes(args.q.shape[2], IsFp8(args.kv_dtype));
  if (countable && fits) {
    const int64_t blocks = SplitBlocks(args.q.shape[2], problem.num_kv_heads);
    choice.engines |= kUseSplit | blocks << kSplitBlocksShift;
    if (longest <= split_rows) {
      choice.engines |= kSplitAll;
      choice.reason = "few queries: split";
      return choice;
    }
  }
  choice.reason = WhyNotWide(problem);
  if (choice.reason[0] == '\0') choice.engines |= kUseWide;
  return choice;
}

flashxla_status Needs(const flashxla_attention_args& args, flashxla_attention_needs* needs) {
  if (const flashxla_status status = CheckSizes(args); status != FLASHXLA_OK) return status;
  const Choice choice = ChooseEngines(args);
  const bool tensor_cores = HasTensorCores(args);
  needs->plan_words = LayoutOf(args).words();
  needs->workspace_bytes =
      PartialBytes(args, MakeProblem(args), choice.engines) + needs->plan_words * 4;
  needs->engines = choice.engines;
  needs->reason = choice.reason;
  needs->few_queries = choice.engines & kUseSplit ? "split: tensor cores, keys shared out"
                       : tensor_cores             ? "tile: tensor cores"
                                                  : "simt: CUDA cores";
  needs->many_queries = choice.engines & kSplitAll  ? needs->few_queries
                        : choice.engines & kUseWide ? "wide: Hopper tensor cores, TMA"
                        : tensor_cores              ? "tile: tensor cores"
                                                    : "simt: CUDA cores";
  return FLASHXLA_OK;
}

}  // namespace attention
}  // namespace flashxla

flashxla_status flashxla_cuda_attention(const flashxla_attention_args* args,
                                        const flashxla_context* context) {
  using namespace flashxla;
  return Guarded("attention", [&] { return attention::Attend(*args, context); });
}

flashxla_status flashxla_cuda_attention_plan(const flashxla_attention_plan_args* args,
                                             const flashxla_context* context) {
  using namespace flashxla;
  return Guarded("attention_plan", [&] {
    if (args->num_kv_heads > 0) attention::LaunchPlan(*args, StreamOf(context));
    return LaunchStatus("attention_plan");
  });
}

flashxla_status flashxla_cuda_attention_needs(const flashxla_attention_args* args,
                                              flashxla_attention_needs* needs) {
  using namespace flashxla;
  return Guarded("attention_needs", [&] { return attention::Needs(*args, needs); });
}
