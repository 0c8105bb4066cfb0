#include "cpu/attention_problem.h"

#include <algorithm>
#include <limits>

#include "common/error.h"
#include "cpu/dtypes.h"

namespace flashxla {
namespace {

// Larger than any position, small enough that sums stay far from overflow.
constexpr int64_t kUnlimited = int64_t{1} << 40;

int64_t ClampWindow(int64_t window) {
  return window < 0 ? kUnlimited : std::min(window, kUnlimited);
}

QueryView ViewQueries(const flashxla_tensor& t) {
  return {static_cast<char*>(t.data), t.dtype, t.stride[0], t.stride[1], t.stride[2]};
}

CacheView ViewDense(const flashxla_tensor& t) {
  CacheView view;
  view.data = static_cast<char*>(t.data);
  view.num_blocks = 1;
  view.block_size = t.shape[0], view.stride_token = t.stride[0];
  view.num_heads = t.shape[1], view.stride_head = t.stride[1];
  view.head_size = t.shape[2], view.stride_dim = t.stride[2];
  return view;
}

}  // namespace

KeyRange AttentionProblem::Visible(const Sequence& sequence, int64_t i) const {
  const int64_t diagonal = i + sequence.length - sequence.num_queries;
  return {std::max(sequence.first_key, diagonal - window_left),
          std::min(sequence.num_keys, diagonal + window_right + 1)};
}

void AttentionProblem::ListKeys(const Sequence& sequence, int64_t kv_head, int64_t* next,
                                int64_t end, int64_t max, KeyList* list) const {
  const bool paged = args->block_table.data != nullptr;
  const int64_t element_size = ElementSize(args->kv_dtype);
  int64_t position = *next, size = 0;
  max = std::min(max, KeyList::kMaxKeys);
  while (position < end && size < max) {
    int64_t block = 0, offset = sequence.key_row + position;
    if (paged) {
      const int64_t page = position / k.block_size;
      offset = position - page * k.block_size;
      block = TableEntry(args->block_table, sequence.index, page);
    }
    const int64_t count = std::min({k.block_size - offset, end - position, max - size});
    if (block >= 0 && block < k.num_blocks) {
      const char* key =
          k.data + (block * k.stride_block + offset * k.stride_token + kv_head * k.stride_head) *
                       element_size;
      const char* value =
          v.data + (block * v.stride_block + offset * v.stride_token + kv_head * v.stride_head) *
                       element_size;
      for (int64_t i = 0; i < count; ++i, ++size) {
        list->key[size] = key + i * k.stride_token * element_size;
        list->value[size] = value + i * v.stride_token * element_size;
        list->position[size] = static_cast<int32_t>(position + i);
      }
    }
    position += count;
  }
  *next = position;
  list->size = size;
}

float AttentionProblem::ScoreScale(const Sequence& sequence, int64_t kv_head) const {
  return static_cast<float>(args->softmax_scale *
                            ScaleView(args->q_descale).at(sequence.index, kv_head) *
                            ScaleView(args->k_descale).at(sequence.index, kv_head));
}

float AttentionProblem::ValueScale(const Sequence& sequence, int64_t kv_head) const {
  return ScaleView(args->v_descale).at(sequence.index, kv_head);
}

float AttentionProblem::AlibiSlope(const Sequence& sequence, int64_t head) const {
  return args->alibi_slopes.data ? ScaleView(args->alibi_slopes).at(sequence.index, head) : 0.0f;
}

float AttentionProblem::Sink(int64_t head) const {
  const flashxla_tensor& sinks = args->sinks;
  float sink = -std::numeric_limits<float>::infinity();
  if (sinks.data == nullptr) return sink;
  WithFormat(sinks.dtype, [&](auto format) {
    using Format = decltype(format);
    sink = Format::Decode(
        static_cast<const typename Format::Bits*>(sinks.data)[head * sinks.stride[0]]);
  });
  return sink;
}

void AttentionProblem::StoreLse(int64_t token, int64_t head, float lse) const {
  const flashxla_tensor& t = args->lse;
  if (t.data == nullptr) return;
  static_cast<float*>(t.data)[head * t.stride[0] + token * t.stride[1]] = lse;
}

flashxla_status ResolveAttention(const flashxla_attention_args& args, bool check_indices,
                                 AttentionProblem* problem) {
  const bool paged = args.block_table.data != nullptr;
  if (paged ? args.seqused_k.data == nullptr : args.cu_seqlens_k.data == nullptr) {
    return SetError(FLASHXLA_INVALID_ARGUMENT, paged ? "paged attention needs seqused_k"
                                                     : "dense attention needs cu_seqlens_k");
  }
  problem->args = &args;
  problem->q = ViewQueries(args.q);
  problem->out = ViewQueries(args.out);
  if (paged) {
    ViewCache(args.k, args.v, args.layout, &problem->k, &problem->v);
  } else {
    problem->k = ViewDense(args.k);
    problem->v = ViewDense(args.v);
  }
  problem->num_tokens = args.q.shape[0];
  problem->num_heads = args.q.shape[1];
  problem->head_size = args.q.shape[2];
  problem->num_kv_heads = problem->k.num_heads;
  if (!IsFloatFormat(args.kv_dtype) || !IsFloatFormat(args.q.dtype) ||
      !IsFloatFormat(args.out.dtype) || problem->head_size > 256 || problem->num_kv_heads < 1) {
    return SetError(FLASHXLA_INVALID_ARGUMENT, "unsupported dtype, head size or head count");
  }
  problem->group_size = problem->num_heads / problem->num_kv_heads;
  problem->window_left = ClampWindow(args.window_left);
  problem->window_right = args.causal ? 0 : ClampWindow(args.window_right);

  const flashxla_status status = ReadSequences(args, problem->k.num_blocks, problem->k.block_size,
                                               check_indices, &problem->sequences);
  int64_t written = 0;  // rows before this one belong to a sequence or are listed as idle
  for (const Sequence& sequence : problem->sequences) {
    if (written < sequence.first_query) problem->idle.push_back({written, sequence.first_query});
    written = sequence.first_query + sequence.num_queries;
  }
  if (written < problem->num_tokens) problem->idle.push_back({written, problem->num_tokens});
  return status;
}

}  // namespace flashxla
