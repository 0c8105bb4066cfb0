// One attention call, resolved: the checked sequences, and where the data lies.
//
// No inline functions: this header is included by code that is compiled for different instruction
// sets, and the linker must not pick one translation unit's copy for another.
#ifndef FLASHXLA_CSRC_CPU_ATTENTION_PROBLEM_H_
#define FLASHXLA_CSRC_CPU_ATTENTION_PROBLEM_H_

#include <cstdint>
#include <vector>

#include "common/index_checks.h"
#include "common/tensor_view.h"
#include "common/visibility.h"
#include "flashxla/attention.h"

namespace flashxla {

// Rows [T, H, D] of queries, outputs or gradients; strides in elements.
struct RowView {
  char* data;
  int64_t dtype;
  int64_t stride_token, stride_head, stride_dim;
};
RowView ViewRows(const flashxla_tensor& t);

// Reads a row of n elements as float; writes a row times a factor.
void ReadRow(const RowView& view, int64_t token, int64_t head, int64_t n, float* values);
void WriteRow(const RowView& view, int64_t token, int64_t head, int64_t n, const float* values,
              float factor);

// Rows [begin, end) of q that belong to no sequence.
struct QueryRange {
  int64_t begin, end;
};

// Keys that exist, in ascending order of position.
struct KeyList {
  static constexpr int64_t kMaxKeys = 128;
  const char* key[kMaxKeys];
  const char* value[kMaxKeys];
  int32_t position[kMaxKeys];
  int64_t size;
};

struct AttentionProblem {
  const flashxla_attention_args* args;
  RowView q, out;
  CacheView k, v;
  int64_t num_tokens, num_heads, num_kv_heads, group_size;
  int64_t head_size, v_head_size;  // of queries and keys; of values and outputs
  BlockTable block_table;
  Window window;
  std::vector<ListedSequence> sequences;
  std::vector<QueryRange> idle;

  // The keys that query i of the sequence sees.
  KeyRange Visible(const Sequence& sequence, int64_t i) const;

  // Lists at most `max` of the keys [*next, end) and moves *next past them. Leaves out the keys of
  // pages whose table entry is unsound.
  void ListKeys(const ListedSequence& sequence, int64_t kv_head, int64_t* next, int64_t end,
                int64_t max, KeyList* list) const;

  // What the dot products are multiplied by before the softcap; what the values are multiplied by.
  float ScoreScale(const ListedSequence& sequence, int64_t kv_head) const;
  float ValueScale(const ListedSequence& sequence, int64_t kv_head) const;
  float AlibiSlope(const ListedSequence& sequence, int64_t head) const;
  float Sink(int64_t head) const;  // -inf without sinks
  void StoreLse(int64_t token, int64_t head, float lse) const;
};

// Fills in all but the sequences, without reading the index tensors. Refuses what the kernels do
// not support.
flashxla_status ResolveAttention(const flashxla_attention_args& args, AttentionProblem* problem);

// Fills in the sequences from the index tensors. With `check`, refuses bad entries.
flashxla_status ResolveSequences(bool check, AttentionProblem* problem);

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CPU_ATTENTION_PROBLEM_H_
