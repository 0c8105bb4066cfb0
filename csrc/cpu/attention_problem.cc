#include "cpu/attention_problem.h"

#include <algorithm>
#include <limits>

#include "common/attention_arguments.h"
#include "cpu/dtypes.h"

namespace flashxla {

RowView ViewRows(const flashxla_tensor& t) {
  return {static_cast<char*>(t.data), t.dtype, t.stride[0], t.stride[1], t.stride[2]};
}

KeyRange AttentionProblem::Visible(const Sequence& sequence, int64_t i) const {
  return VisibleKeys(sequence, window, i, i);
}

void AttentionProblem::ListKeys(const ListedSequence& sequence, int64_t kv_head, int64_t* next,
                                int64_t end, int64_t max, KeyList* list) const {
  const bool paged = block_table.data != nullptr;
  const int64_t element_size = ElementSize(args->kv_dtype);
  int64_t position = *next, size = 0;
  max = std::min(max, KeyList::kMaxKeys);
  while (position < end && size < max) {
    int32_t block = 0;
    int64_t offset = sequence.key_row + position;
    if (paged) {
      const int64_t page = position / k.block_size;
      offset = position - page * k.block_size;
      block = Entry(block_table, sequence.index, page);
    }
    const int64_t count = std::min({k.block_size - offset, end - position, max - size});
    if (IsSound(block_table, block)) {
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

float AttentionProblem::ScoreScale(const ListedSequence& sequence, int64_t kv_head) const {
  return static_cast<float>(args->softmax_scale *
                            ScaleView(args->q_descale).at(sequence.index, kv_head) *
                            ScaleView(args->k_descale).at(sequence.index, kv_head));
}

float AttentionProblem::ValueScale(const ListedSequence& sequence, int64_t kv_head) const {
  return ScaleView(args->v_descale).at(sequence.index, kv_head);
}

float AttentionProblem::AlibiSlope(const ListedSequence& sequence, int64_t head) const {
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
  if (args->lse.data != nullptr) LseAt(args->lse, token, head) = lse;
}

flashxla_status ResolveAttention(const flashxla_attention_args& args, AttentionProblem* problem) {
  if (const flashxla_status status = CheckAttentionArguments(args); status != FLASHXLA_OK) {
    return status;
  }
  problem->args = &args;
  problem->q = ViewRows(args.q);
  problem->out = ViewRows(args.out);
  ViewKeys(args, &problem->k, &problem->v);
  problem->num_tokens = args.q.shape[0];
  problem->num_heads = args.q.shape[1];
  problem->num_kv_heads = problem->k.num_heads;
  problem->group_size = problem->num_heads / problem->num_kv_heads;
  problem->head_size = problem->k.head_size;
  problem->v_head_size = problem->v.head_size;
  problem->block_table = IndexTensorsOf(args).block_table;
  problem->window = WindowOf(args);
  return FLASHXLA_OK;
}

flashxla_status ResolveSequences(bool check, AttentionProblem* problem) {
  const flashxla_status status = ReadSequences(*problem->args, check, &problem->sequences);
  int64_t written = 0;  // rows before this one belong to a sequence or are listed as idle
  for (const Sequence& sequence : problem->sequences) {
    if (written < sequence.first_query) problem->idle.push_back({written, sequence.first_query});
    written = sequence.first_query + sequence.num_queries;
  }
  if (written < problem->num_tokens) problem->idle.push_back({written, problem->num_tokens});
  return status;
}

}  // namespace flashxla
