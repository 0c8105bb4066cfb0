// Cutting an attention call into tasks that run in any order.
#ifndef FLASHXLA_CSRC_CPU_ATTENTION_TASKS_H_
#define FLASHXLA_CSRC_CPU_ATTENTION_TASKS_H_

#include <cstdint>
#include <vector>

#include "cpu/attention_engine.h"
#include "cpu/attention_problem.h"

namespace flashxla {

// Split-KV: tasks that have the same rows and divide their keys. The last one to finish combines
// the partial results.
struct AttentionSplit {
  int64_t num_parts;
  int64_t partials;  // offset of the first part in AttentionTasks::partials
};

struct AttentionTasks {
  std::vector<AttentionTask> tasks;  // the longest first
  std::vector<AttentionSplit> splits;
  std::vector<float> partials;
};

// Floats of one row of a partial result: row_max, row_sum, values.
inline int64_t PartialStride(const AttentionProblem& problem) { return problem.v_head_size + 2; }

// Floats of a partial result: the rows of all the task's KV heads.
inline int64_t PartSize(const AttentionProblem& problem, const AttentionTask& task) {
  return (task.kv_head_end - task.kv_head_begin) * (task.row_end - task.row_begin) *
         PartialStride(problem);
}

// Cuts the call into enough tasks to keep `num_threads` threads busy.
AttentionTasks MakeTasks(const AttentionProblem& problem, const AttentionEngines& engines,
                         int64_t num_threads);

// Combines the partial results of a split and writes its rows. `task` is any of its tasks.
void CombineParts(const AttentionProblem& problem, const AttentionTask& task, const float* partials,
                  int64_t num_parts);

// Writes a row that sees no key.
void StoreZeros(const AttentionProblem& problem, int64_t token, int64_t head, float lse);

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CPU_ATTENTION_TASKS_H_
