// The gradients of attention over dense keys and values: the C ABI's function.
#include <algorithm>
#include <cstdio>
#include <iterator>

#include "common/attention_arguments.h"
#include "common/attention_backward_arguments.h"
#include "common/error.h"
#include "common/needs.h"
#include "cuda/attention_backward/aligned_copies.h"
#include "cuda/attention_backward/engines.h"
#include "cuda/check.h"
#include "flashxla/attention_backward.h"

namespace flashxla::attention_backward {
namespace {

// For each call the fastest engine that serves it.
constexpr const Engine* kEngines[] = {&kWideEngine, &kTileEngine, &kTile32Engine, &kGeneralEngine};

constexpr int64_t kMaxGridY = 65535;

Rows RowsOf(const flashxla_tensor& t) {
  return {static_cast<char*>(t.data), t.stride[0], t.stride[1], t.stride[2]};
}

LseRows LseOf(const flashxla_tensor& t) {
  return {static_cast<float*>(t.data), t.stride[0], t.stride[1]};
}

bool IsAligned(const flashxla_tensor& t) { return reinterpret_cast<uintptr_t>(t.data) % 16 == 0; }

// With `aligned`, assumes aligned addresses instead of reading them: what a call needs is asked
// before the addresses are known.
Problem ProblemOf(const flashxla_attention_backward_args& args,
                  const flashxla_attention_args& forward, bool aligned) {
  Problem p = {};
  p.q = RowsOf(args.q), p.k = RowsOf(args.k), p.v = RowsOf(args.v);
  p.grad_out = RowsOf(args.grad_out), p.out = RowsOf(args.out);
  p.grad_q = RowsOf(args.grad_q), p.grad_k = RowsOf(args.grad_k), p.grad_v = RowsOf(args.grad_v);
  p.lse = LseOf(args.lse), p.grad_lse = LseOf(args.grad_lse);
  p.window = WindowOf(forward);
  p.num_tokens = static_cast<int32_t>(args.q.shape[0]);
  p.num_keys = static_cast<int32_t>(args.k.shape[0]);
  p.num_heads = static_cast<int32_t>(args.q.shape[1]);
  p.num_kv_heads = static_cast<int32_t>(args.k.shape[1]);
  p.group_size = p.num_heads / p.num_kv_heads;
  p.head_size = static_cast<int32_t>(args.q.shape[2]);
  p.v_head_size = static_cast<int32_t>(args.v.shape[2]);
  p.dtype = static_cast<int32_t>(args.q.dtype);
  p.sink_dtype = static_cast<int32_t>(args.sinks.dtype);
  p.softmax_scale = static_cast<float>(args.softmax_scale);
  p.softcap = static_cast<float>(args.softcap);
  p.deterministic = args.deterministic != 0;
  const ScaleView slopes(args.alibi_slopes);
  p.alibi_slopes = {slopes.data, slopes.stride_seq, slopes.stride_head};
  p.sinks = args.sinks.data, p.sinks_stride = args.sinks.stride[0];
  p.grad_sinks = args.grad_sinks.data, p.grad_sinks_stride = args.grad_sinks.stride[0];
  const flashxla_tensor tensors[] = {args.q,   args.k,      args.v,      args.grad_out,
                                     args.out, args.grad_q, args.grad_k, args.grad_v};
  p.vectors = std::all_of(std::begin(tensors), std::end(tensors), InVectors) &&
              (aligned || std::all_of(std::begin(tensors), std::end(tensors), IsAligned));
  return p;
}

int KeyTileOf(const Problem& p, const Engine& engine) {
  constexpr int kAny = 128;
  return engine.key_tile ? engine.key_tile(p) : kAny;
}

int SumsOf(const Problem& p, const Engine& engine) {
  return engine.num_sums ? engine.num_sums(p) : 0;
}

// What the workspace holds after aligned copies: the plan, lse2 and delta, the turns and the
// engine's sums.
struct Workspace {
  PlanLayout layout;
  int64_t rows, turns, sums, bytes;  // offsets; bytes of all

  Workspace(const Problem& p, int64_t num_sequences, const Engine& engine)
      : layout(num_sequences, p.num_tokens, p.num_keys, KeyTileOf(p, engine)) {
    rows = PartBytes(layout.words() * int64_t{sizeof(int32_t)});
    turns = rows + 2 * RowBytes(p);
    sums = turns + PartBytes(NumTiles(p) * int64_t{sizeof(int32_t)});
    bytes = sums + NumTiles(p) * SumsOf(p, engine) * int64_t{sizeof(float)};
  }
  int64_t NumTiles(const Problem& p) const { return int64_t{layout.num_row_tiles} * p.num_heads; }
  int64_t RowBytes(const Problem& p) const {
    return PartBytes(NumTiles(p) * kRowTile * int64_t{sizeof(float)});
  }
};

const Engine& Choose(const Problem& p, const char** why_not_fastest) {
  *why_not_fastest = kEngines[0]->why_not(p);
  for (const Engine* engine : kEngines) {
    if (engine->why_not(p)[0] == '\0') return *engine;
  }
  return kGeneralEngine;
}

// The call that the engines see: on aligned copies where that lets a fast one serve it.
AlignedCall CallOf(const flashxla_attention_backward_args& args,
                   const flashxla_attention_args& forward) {
  const AlignedCall call = AlignedCallOf(args);
  const char* why_not_fastest;
  const Engine& engine = Choose(ProblemOf(call.args, forward, true), &why_not_fastest);
  return &engine == &kGeneralEngine ? AlignedCall{args, 0} : call;
}

// What an engine is, and what it works on.
const char* Description(const Engine& engine, bool copies) {
  if (!copies) return engine.description;
  static thread_local char all[128];  // valid until this thread's next call
  std::snprintf(all, sizeof(all), "%s, on aligned copies", engine.description);
  return all;
}

// Writes zeros.
flashxla_status Clear(const flashxla_tensor& t, cudaStream_t stream) {
  int64_t dense = 1;
  bool is_dense = true;
  for (int64_t i = t.rank - 1; i >= 0; --i) {
    is_dense &= t.shape[i] == 1 || t.stride[i] == dense;
    dense *= t.shape[i];
  }
  if (t.data == nullptr || dense == 0) return FLASHXLA_OK;
  if (!is_dense) {
    LaunchClear(t, stream);
    return LaunchStatus("attention_backward");
  }
  return CudaStatus("attention_backward",
                    cudaMemsetAsync(t.data, 0, dense * ElementSize(t.dtype), stream));
}

// Of a call that has no rows or no sequences.
flashxla_status ClearAll(const flashxla_attention_backward_args& args, cudaStream_t stream) {
  for (const auto* t : {&args.grad_q, &args.grad_k, &args.grad_v, &args.grad_sinks}) {
    const flashxla_status status = Clear(*t, stream);
    if (status != FLASHXLA_OK) return status;
  }
  return FLASHXLA_OK;
}

flashxla_status Run(const flashxla_attention_backward_args& args,
                    const flashxla_attention_args& forward, const flashxla_context& context,
                    Problem p, const Engine& engine, const Workspace& workspace) {
  const cudaStream_t stream = StreamOf(&context);
  char* memory = static_cast<char*>(args.workspace.data);
  auto* words = reinterpret_cast<int32_t*>(memory);
  LaunchPlan(IndexTensorsOf(forward), p.window, p.group_size, p.deterministic, workspace.layout,
             words, stream);
  p.plan = PlanView(words, workspace.layout);
  p.lse2 = reinterpret_cast<float*>(memory + workspace.rows);
  p.delta = reinterpret_cast<float*>(memory + workspace.rows + workspace.RowBytes(p));
  p.sums = reinterpret_cast<float*>(memory + workspace.sums);
  p.num_sums = SumsOf(p, engine);
  p.turns = reinterpret_cast<int32_t*>(memory + workspace.turns);
  LaunchDelta(p, stream);
  LaunchIdle(p, stream);
  flashxla_status status = LaunchStatus("attention_backward");
  if (!engine.takes_shared_keys) {
    if (status == FLASHXLA_OK) status = Clear(args.grad_k, stream);
    if (status == FLASHXLA_OK) status = Clear(args.grad_v, stream);
    p.only_shared = true;
    if (status == FLASHXLA_OK) status = kTileEngine.launch(p, stream);
    p.only_shared = false;
  }
  if (status == FLASHXLA_OK) status = engine.launch(p, stream);
  if (status == FLASHXLA_OK && p.grad_sinks != nullptr) LaunchSinks(p, stream);
  return status == FLASHXLA_OK ? LaunchStatus("attention_backward") : status;
}

flashxla_status Differentiate(const flashxla_attention_backward_args& args,
                              const flashxla_context& context) {
  const flashxla_attention_args forward = ForwardOf(args);
  flashxla_status status = CheckAttentionArguments(forward);
  if (status == FLASHXLA_OK) status = CheckAttentionBackwardArguments(args);
  if (status != FLASHXLA_OK) return status;
  const AlignedCall call = CallOf(args, forward);
  // The workspace is that of the engine for aligned addresses; the others need none.
  const Problem aligned = ProblemOf(call.args, forward, true);
  const char* why_not_fastest;
  const Engine& usual = Choose(aligned, &why_not_fastest);
  const int64_t num_sequences = args.cu_seqlens_q.shape[0] - 1;
  const Workspace workspace(aligned, num_sequences, usual);
  if (context.needs != nullptr) {
    *context.needs = {};
    context.needs->workspace_bytes = call.bytes + workspace.bytes;
    AddKernel(context.needs,
              {"all", usual.name, Description(usual, call.bytes > 0), why_not_fastest});
    return FLASHXLA_OK;
  }
  if (context.prepare) return FLASHXLA_OK;
  if (aligned.num_heads > kMaxGridY) {
    return SetError(FLASHXLA_INVALID_ARGUMENT, "q: %d heads; accepted: at most 65535",
                    aligned.num_heads);
  }
  if (args.workspace.data == nullptr || args.workspace.shape[0] < call.bytes + workspace.bytes) {
    return SetError(FLASHXLA_INTERNAL, "attention_backward: the workspace is too small");
  }
  status = CheckAttention(forward, &context);
  if (status != FLASHXLA_OK) return status;
  const cudaStream_t stream = StreamOf(&context);
  if (aligned.num_heads == 0 || aligned.num_tokens == 0 || num_sequences == 0) {
    return ClearAll(args, stream);
  }
  const Problem p = ProblemOf(call.args, forward, false);
  LaunchFill(args, call, stream);
  status = Run(call.args, forward, context, p, Choose(p, &why_not_fastest), workspace);
  if (status != FLASHXLA_OK) return status;
  LaunchReturn(args, call, stream);
  return LaunchStatus("attention_backward");
}

}  // namespace
}  // namespace flashxla::attention_backward

flashxla_status flashxla_cuda_attention_backward(const flashxla_attention_backward_args* args,
                                                 const flashxla_context* context) {
  using namespace flashxla;
  return Guarded("attention_backward",
                 [&] { return attention_backward::Differentiate(*args, *context); });
}
