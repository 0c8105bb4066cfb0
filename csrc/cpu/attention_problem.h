// One attention call, resolved: what the index tensors say, checked, and where everything lies.
//
// No inline functions: this header is included by code that is compiled for different instruction
// sets, and the linker must not pick one translation unit's copy for another.
#ifndef FLASHXLA_CSRC_CPU_ATTENTION_PROBLEM_H_
#define FLASHXLA_CSRC_CPU_ATTENTION_PROBLEM_H_

#include <cstdint>
#include <vector>

#include "common/index_checks.h"
#include "common/tensor_view.h"
#include "flashxla/attention.h"

namespace flashxla {

// Queries or outputs [T, Hq, D]; strides in elements.
struct QueryView {
  char* data;
  int64_t dtype;
  int64_t stride_token, stride_head, stride_dim;
};

// Keys [begin, end) of a sequence.
struct KeyRange {
  int64_t begin, end;
};

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
  QueryView q, out;
  CacheView k, v;
  int64_t num_tokens, num_heads, num_kv_heads, group_size, head_size;
  int64_t window_left, window_right;  // clamped, so that sums with positions do not overflow
  std::vector<Sequence> sequences;
  std::vector<QueryRange> idle;

  // The keys that query i of the sequence can see; empty ranges have end <= begin. Both ends grow
  // with i.
  KeyRange Visible(const Sequence& sequence, int64_t i) const;

  // Lists at most `max` of the keys [*next, end) and moves *next behind them. Keys of pages whose
  // table entry is unsound are left out.
  void ListKeys(const Sequence& sequence, int64_t kv_head, int64_t* next, int64_t end, int64_t max,
                KeyList* list) const;

  // Factor of the dot products, without the softcap; factor of the values.
  float ScoreScale(const Sequence& sequence, int64_t kv_head) const;
  float ValueScale(const Sequence& sequence, int64_t kv_head) const;
  float AlibiSlope(const Sequence& sequence, int64_t head) const;
  float Sink(int64_t head) const;  // -inf without sinks
  void StoreLse(int64_t token, int64_t head, float lse) const;
};

// Fills *problem from the arguments. With check_indices, refuses bad index entries.
flashxla_status ResolveAttention(const flashxla_attention_args& args, bool check_indices,
                                 AttentionProblem* problem);

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CPU_ATTENTION_PROBLEM_H_
