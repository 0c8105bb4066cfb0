// The vectorized part of attention, compiled once per instruction set.
#ifndef FLASHXLA_CSRC_CPU_ATTENTION_ENGINE_H_
#define FLASHXLA_CSRC_CPU_ATTENTION_ENGINE_H_

#include <cstdint>

#include "cpu/attention_problem.h"

namespace flashxla {

// Rows of one KV head are numbered query * group_size + (head in the group), so that neighbouring
// rows see nearly the same keys.
struct AttentionTask {
  const Sequence* sequence;
  int64_t kv_head_begin, kv_head_end;
  int64_t row_begin, row_end;  // of each KV head
  int64_t key_begin, key_end;  // positions; what a row can see of them is up to Visible()
  bool few_rows;               // for AttentionEngine::attend_few_rows
  int64_t split;               // the group of tasks that share these rows, or -1
  float* partial;              // where a task of a split leaves its result
  int64_t cost;
};

// The state of an online softmax over base-2 scores.
struct RowState {
  float top;  // the largest score
  float sum;  // of 2^(score - top)
};

// Writes a row of a KV head: `values` is the sum of 2^(score - top) * value.
void FinishRow(const AttentionProblem& problem, const AttentionTask& task, int64_t kv_head,
               int64_t row, const float* values, RowState state);

// Reads a row of a KV head's queries as float.
void LoadQuery(const AttentionProblem& problem, const AttentionTask& task, int64_t kv_head,
               int64_t row, float* values);

struct AttentionEngine {
  using Attend = void (*)(const AttentionProblem& problem, const AttentionTask& task,
                          void* scratch);

  // For many rows of one KV head: scores and values are products of tiles.
  Attend attend_tiles;
  int64_t panel_rows;                           // rows that are computed together
  int64_t (*max_tile_rows)(int64_t head_size);  // rows of a task

  // For few rows, bound by memory: reads keys and values once, as they are, for several KV heads.
  // Needs stride_dim == 1 and head_size >= min_head_size.
  Attend attend_few_rows;
  int64_t max_few_rows;       // of a KV head
  int64_t max_few_rows_task;  // of a task, over its KV heads
  int64_t min_head_size;

  // What they need as scratch memory, 64-byte aligned.
  int64_t (*tile_scratch_bytes)(int64_t head_size);
  int64_t few_rows_scratch_bytes;
};

const AttentionEngine& BaselineAttentionEngine();
const AttentionEngine& Avx2AttentionEngine();    // x86-64 only
const AttentionEngine& Avx512AttentionEngine();  // x86-64 only

// The best one that this machine runs.
const AttentionEngine& GetAttentionEngine();

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CPU_ATTENTION_ENGINE_H_
