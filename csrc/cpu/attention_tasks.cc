#include "cpu/attention_tasks.h"

#include <algorithm>

namespace flashxla {
namespace {

// Tasks for each thread, so that uneven ones even out.
constexpr int64_t kTasksPerThread = 4;

// A part of a split has at least this many keys: merging must stay cheap beside it.
constexpr int64_t kMinSplitKeys = 256;

// What a key costs even with a single row: its bytes must come from memory.
constexpr int64_t kMinRowCost = 16;

class TaskMaker {
 public:
  TaskMaker(const AttentionProblem& problem, const AttentionEngine& engine)
      : problem_(problem), engine_(engine) {
    in_place_ = problem.k.stride_dim == 1 && problem.v.stride_dim == 1 &&
                problem.head_size >= engine.min_head_size;
  }

  // One task for each KV head and block of rows.
  std::vector<AttentionTask> Make(int64_t block_rows) const {
    std::vector<AttentionTask> tasks;
    for (const Sequence& sequence : problem_.sequences) {
      const int64_t num_rows = sequence.num_queries * problem_.group_size;
      const bool few_rows = in_place_ && num_rows <= engine_.max_few_rows;
      for (int64_t row = 0; row < num_rows; row += block_rows) {
        AttentionTask task = {};
        task.sequence = &sequence;
        task.row_begin = row;
        task.row_end = std::min(row + block_rows, num_rows);
        task.key_begin = problem_.Visible(sequence, row / problem_.group_size).begin;
        task.key_end = problem_.Visible(sequence, (task.row_end - 1) / problem_.group_size).end;
        task.key_end = std::max(task.key_begin, task.key_end);
        task.few_rows = few_rows;
        task.split = -1;
        task.cost = Cost(task);
        for (task.kv_head = 0; task.kv_head < problem_.num_kv_heads; ++task.kv_head) {
          tasks.push_back(task);
        }
      }
    }
    return tasks;
  }

  static int64_t Cost(const AttentionTask& task) {
    return (task.key_end - task.key_begin) * std::max(task.row_end - task.row_begin, kMinRowCost);
  }

 private:
  const AttentionProblem& problem_;
  const AttentionEngine& engine_;
  bool in_place_;
};

void SplitKeys(const AttentionTask& task, int64_t num_parts, int64_t head_size,
               AttentionTasks* result) {
  const int64_t num_rows = task.row_end - task.row_begin;
  const int64_t part_size = num_rows * PartialStride(head_size);
  AttentionTask part = task;
  part.split = static_cast<int64_t>(result->splits.size());
  const int64_t partials = static_cast<int64_t>(result->partials.size());
  result->splits.push_back({num_parts, partials});
  result->partials.resize(partials + num_parts * part_size);
  const int64_t num_keys = task.key_end - task.key_begin;
  for (int64_t i = 0; i < num_parts; ++i) {
    part.key_begin = task.key_begin + num_keys * i / num_parts;
    part.key_end = task.key_begin + num_keys * (i + 1) / num_parts;
    part.cost = TaskMaker::Cost(part);
    result->tasks.push_back(part);
  }
}

}  // namespace

AttentionTasks MakeTasks(const AttentionProblem& problem, const AttentionEngine& engine,
                         int64_t num_threads) {
  const TaskMaker maker(problem, engine);
  const int64_t wanted = num_threads == 1 ? 1 : num_threads * kTasksPerThread;
  int64_t block_rows = engine.max_panel_rows;
  std::vector<AttentionTask> tasks = maker.Make(block_rows);
  while (static_cast<int64_t>(tasks.size()) < wanted && block_rows > engine.panel_rows) {
    block_rows -= engine.panel_rows;
    tasks = maker.Make(block_rows);
  }

  AttentionTasks result;
  result.tasks.reserve(tasks.size());
  int64_t total = 0;
  for (const AttentionTask& task : tasks) total += task.cost;
  const int64_t target = std::max<int64_t>(total / wanted, 1);
  for (const AttentionTask& task : tasks) {
    const int64_t most = (task.key_end - task.key_begin) / kMinSplitKeys;
    const int64_t num_parts = std::min(most, task.cost / target);
    if (wanted == 1 || num_parts < 2) {
      result.tasks.push_back(task);
    } else {
      SplitKeys(task, num_parts, problem.head_size, &result);
    }
  }
  // The vector does not grow any more: the tasks can point into it.
  std::vector<int64_t> next_part(result.splits.size(), 0);
  for (AttentionTask& task : result.tasks) {
    if (task.split < 0) continue;
    const int64_t part_size = (task.row_end - task.row_begin) * PartialStride(problem.head_size);
    task.partial = result.partials.data() + result.splits[task.split].partials +
                   next_part[task.split]++ * part_size;
  }
  std::sort(result.tasks.begin(), result.tasks.end(),
            [](const AttentionTask& a, const AttentionTask& b) { return a.cost > b.cost; });
  return result;
}

}  // namespace flashxla
