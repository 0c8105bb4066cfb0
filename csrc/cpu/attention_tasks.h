// Cutting an attention call into tasks that run in any order.
#ifndef FLASHXLA_CSRC_CPU_ATTENTION_TASKS_H_
#define FLASHXLA_CSRC_CPU_ATTENTION_TASKS_H_

#include <cstdint>
#include <vector>

#include "cpu/attention_engine.h"
#include "cpu/attention_problem.h"

namespace flashxla {

// Tasks that share their rows and divide the keys; the last one to finish merges the parts.
struct AttentionSplit {
  int64_t num_parts;
  int64_t partials;  // offset of the first part in AttentionTasks::partials
};

struct AttentionTasks {
  std::vector<AttentionTask> tasks;  // the longest first
  std::vector<AttentionSplit> splits;
  std::vector<float> partials;
};

// Floats of one row of a part: top, sum, values.
inline int64_t PartialStride(int64_t head_size) { return head_size + 2; }

// Floats of a part: its KV heads' rows.
inline int64_t PartSize(const AttentionTask& task, int64_t head_size) {
  return (task.kv_head_end - task.kv_head_begin) * (task.row_end - task.row_begin) *
         PartialStride(head_size);
}

// Cuts so that `num_threads` threads have something to do.
AttentionTasks MakeTasks(const AttentionProblem& problem, const AttentionEngine& engine,
                         int64_t num_threads);

// Writes the rows of a split from its parts. `task` is any of its tasks.
void MergeParts(const AttentionProblem& problem, const AttentionTask& task, const float* partials,
                int64_t num_parts);

// Writes a row that sees no key.
void StoreZeros(const AttentionProblem& problem, int64_t token, int64_t head, float lse);

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CPU_ATTENTION_TASKS_H_
