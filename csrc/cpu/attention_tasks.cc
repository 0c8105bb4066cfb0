#include "cpu/attention_tasks.h"

#include <algorithm>

namespace flashxla {
namespace {

// Tasks per thread: with several, uneven ones balance out.
constexpr int64_t kTasksPerThread = 8;

// A part of a split has at least this many keys, so that combining the parts stays cheap.
constexpr int64_t kMinSplitKeys = 256;

// A key costs at least as much as this many rows: even for one row it is read from memory.
constexpr int64_t kMinRowCost = 16;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t CostOf(const AttentionTask& task) {
  return (task.key_end - task.key_begin) * (task.kv_head_end - task.kv_head_begin) *
         std::max(task.row_end - task.row_begin, kMinRowCost);
}

class TaskMaker {
 public:
  TaskMaker(const AttentionProblem& problem, const AttentionEngines& engines, int64_t wanted)
      : problem_(problem),
        engines_(engines),
        wanted_(wanted),
        use_few_rows_(WhyNoFewRows(engines, problem)[0] == '\0') {}

  AttentionTasks Make() {
    // Large blocks of rows and many KV heads per task read the least memory; smaller ones keep more
    // threads busy. Splitting the keys comes last, because it costs combining the parts.
    int64_t block_rows = engines_.max_tile_rows(problem_);
    int64_t few_rows_heads = engines_.max_few_rows_task;
    AddBlocks(block_rows, few_rows_heads);
    while (NumParts() < wanted_ && (block_rows > engines_.panel_rows || few_rows_heads > 1)) {
      block_rows = std::max(block_rows / 2, engines_.panel_rows);
      few_rows_heads = std::max<int64_t>(few_rows_heads / 2, 1);
      AddBlocks(block_rows, few_rows_heads);
    }
    AttentionTasks result = SplitKeys();
    // Stable: the heads of a sequence, neighbours in memory, follow each other.
    std::stable_sort(
        result.tasks.begin(), result.tasks.end(),
        [](const AttentionTask& a, const AttentionTask& b) { return a.cost > b.cost; });
    return result;
  }

 private:
  // Cuts the call into blocks of rows and KV heads.
  void AddBlocks(int64_t block_rows, int64_t few_rows_heads) {
    blocks_.clear();
    total_cost_ = 0;
    for (const ListedSequence& sequence : problem_.sequences) {
      const int64_t num_rows = sequence.num_queries * problem_.group_size;
      if (num_rows == 0) continue;  // no heads of queries
      AttentionTask task = {};
      task.sequence = &sequence;
      task.split = -1;
      task.few_rows = use_few_rows_ && num_rows <= engines_.max_few_rows;
      int64_t heads = 1;
      if (task.few_rows) {
        heads = std::min(few_rows_heads, engines_.max_few_rows_task / num_rows);
        heads = CeilDiv(problem_.num_kv_heads, CeilDiv(problem_.num_kv_heads, heads));
      }
      for (int64_t row = 0; row < num_rows; row += block_rows) {
        task.row_begin = row;
        task.row_end = std::min(row + block_rows, num_rows);
        task.key_begin = problem_.Visible(sequence, row / problem_.group_size).begin;
        task.key_end = std::max<int64_t>(
            task.key_begin,
            problem_.Visible(sequence, (task.row_end - 1) / problem_.group_size).end);
        for (int64_t head = 0; head < problem_.num_kv_heads; head += heads) {
          task.kv_head_begin = head;
          task.kv_head_end = std::min(head + heads, problem_.num_kv_heads);
          task.cost = CostOf(task);
          total_cost_ += task.cost;
          blocks_.push_back(task);
        }
      }
    }
  }

  int64_t PartsOf(const AttentionTask& block) const {
    // The sum of parts depends on where they begin.
    if (wanted_ == 1 || problem_.args->batch_invariant != 0) return 1;
    const int64_t most = (block.key_end - block.key_begin) / kMinSplitKeys;
    const int64_t target = std::max<int64_t>(total_cost_ / wanted_, 1);
    return std::max<int64_t>(std::min(most, block.cost / target), 1);
  }

  int64_t NumParts() const {
    int64_t parts = 0;
    for (const AttentionTask& block : blocks_) parts += PartsOf(block);
    return parts;
  }

  AttentionTasks SplitKeys() const {
    AttentionTasks result;
    int64_t partials = 0;
    for (const AttentionTask& block : blocks_) {
      const int64_t num_parts = PartsOf(block);
      if (num_parts > 1) partials += num_parts * PartSize(problem_, block);
    }
    result.partials.resize(partials);
    partials = 0;
    for (const AttentionTask& block : blocks_) {
      const int64_t num_parts = PartsOf(block);
      if (num_parts == 1) {
        result.tasks.push_back(block);
        continue;
      }
      AttentionTask part = block;
      part.split = static_cast<int64_t>(result.splits.size());
      result.splits.push_back({num_parts, partials});
      const int64_t num_keys = block.key_end - block.key_begin;
      for (int64_t i = 0; i < num_parts; ++i) {
        part.key_begin = block.key_begin + num_keys * i / num_parts;
        part.key_end = block.key_begin + num_keys * (i + 1) / num_parts;
        part.partial = result.partials.data() + partials;
        part.cost = CostOf(part);
        result.tasks.push_back(part);
        partials += PartSize(problem_, block);
      }
    }
    return result;
  }

  const AttentionProblem& problem_;
  const AttentionEngines& engines_;
  const int64_t wanted_;  // tasks
  const bool use_few_rows_;
  std::vector<AttentionTask> blocks_;
  int64_t total_cost_ = 0;
};

}  // namespace

AttentionTasks MakeTasks(const AttentionProblem& problem, const AttentionEngines& engines,
                         int64_t num_threads) {
  return TaskMaker(problem, engines, num_threads == 1 ? 1 : num_threads * kTasksPerThread).Make();
}

}  // namespace flashxla
