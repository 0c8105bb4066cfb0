// The vectorized part of attention, compiled once per instruction set.
#ifndef FLASHXLA_CSRC_CPU_ATTENTION_ENGINE_H_
#define FLASHXLA_CSRC_CPU_ATTENTION_ENGINE_H_

#include <cstdint>

#include "cpu/attention_backward_engine.h"
#include "cpu/attention_problem.h"

namespace flashxla {

// A row is one query token of one query head. The rows of a KV head are numbered
// query * group_size + (head in the group), so that neighbouring rows see nearly the same keys.
struct AttentionTask {
  const ListedSequence* sequence;
  int64_t kv_head_begin, kv_head_end;
  int64_t row_begin, row_end;  // of each KV head
  int64_t key_begin, key_end;  // positions; Visible() says which of them a row sees
  bool few_rows;               // which engine runs it: few_rows or tiles
  int64_t split;               // the split (split-KV) that the task is a part of, or -1
  float* partial;              // where a part of a split stores its result
  int64_t cost;
};

// The state of an online softmax over base-2 scores.
struct RowState {
  float row_max;  // the largest score
  float row_sum;  // of 2^(score - row_max)
};

// Writes the result of a row, or the task's partial result. `values` is the sum of
// 2^(score - row_max) * value.
void FinishRow(const AttentionProblem& problem, const AttentionTask& task, int64_t kv_head,
               int64_t row, const float* values, RowState state);

// Reads a row of a KV head's queries as float.
void LoadQuery(const AttentionProblem& problem, const AttentionTask& task, int64_t kv_head,
               int64_t row, float* values);

// One way to compute a task.
struct AttentionEngine {
  const char* name;
  const char* description;
  void (*attend)(const AttentionProblem& problem, const AttentionTask& task, void* scratch);
  int64_t (*scratch_bytes)(const AttentionProblem& problem);  // for each worker, 64-byte aligned
};

// The engines of an instruction set.
struct AttentionEngines {
  // For few rows (decode), which memory bandwidth limits: streams keys and values once, without a
  // copy. A task may have several KV heads.
  AttentionEngine few_rows;
  int64_t max_few_rows;                                              // per KV head
  int64_t max_few_rows_task;                                         // per task, all its KV heads
  const char* (*why_not_few_rows)(const AttentionProblem& problem);  // "" if it can

  // For any number of rows of one KV head: multiplies tiles of queries, keys and values.
  AttentionEngine tiles;
  int64_t panel_rows;                                         // rows computed together
  int64_t (*max_tile_rows)(const AttentionProblem& problem);  // per task

  AttentionBackwardEngine backward;
};

const AttentionEngines& BaselineAttentionEngines();
const AttentionEngines& Avx2AttentionEngines();        // x86-64 only
const AttentionEngines& Avx512AttentionEngines();      // x86-64 only
const AttentionEngines& Avx512Bf16AttentionEngines();  // x86-64 only

// The engines of the instruction set in use (GetIsa).
const AttentionEngines& GetAttentionEngines();

// Why few_rows serves no sequence of a call; "" if it serves those of few rows.
const char* WhyNoFewRows(const AttentionEngines& engines, const AttentionProblem& problem);

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CPU_ATTENTION_ENGINE_H_
