#include "cpu/attention_backward_problem.h"

#include <algorithm>
#include <utility>

#include "common/attention_backward_arguments.h"

namespace flashxla {
namespace {

// Tasks per thread where clusters are shared: with several, uneven ones balance out.
constexpr int64_t kTasksPerThread = 4;

float LseAt(const flashxla_tensor& t, int64_t token, int64_t head) {
  return static_cast<const float*>(t.data)[head * t.stride[0] + token * t.stride[1]];
}

// A row costs something even where it sees no key.
constexpr int64_t kRowCost = 8;

int64_t CostOf(const BackwardBlock& block) {
  return (block.row_end - block.row_begin) * (block.key_end - block.key_begin + kRowCost);
}

// The sequences in the order of their keys.
std::vector<const ListedSequence*> ByKeys(const AttentionProblem& problem) {
  std::vector<const ListedSequence*> sequences;
  for (const ListedSequence& sequence : problem.sequences) sequences.push_back(&sequence);
  std::stable_sort(sequences.begin(), sequences.end(),
                   [](const auto* a, const auto* b) { return a->key_row < b->key_row; });
  return sequences;
}

class TaskMaker {
 public:
  TaskMaker(const AttentionProblem& problem, int64_t num_threads)
      : problem_(problem),
        sequences_(ByKeys(problem)),
        wanted_(num_threads == 1 ? 1 : num_threads * kTasksPerThread) {}

  BackwardTasks Make(int64_t max_rows, int64_t panel_rows) {
    // Large blocks of rows read the least memory; smaller ones keep more threads busy.
    int64_t block_rows = max_rows;
    AddAll(block_rows);
    while (NumTasks() < wanted_ && block_rows > panel_rows) {
      block_rows = std::max(block_rows / 2, panel_rows);
      AddAll(block_rows);
    }
    return std::move(work_);
  }

 private:
  int64_t NumTasks() const { return static_cast<int64_t>(work_.tasks.size()); }

  void AddAll(int64_t block_rows) {
    work_ = {};
    int64_t cost = 0;
    for (const ListedSequence* sequence : sequences_) {
      AddToClusters(*sequence);
      cost += AddBlocks(*sequence, block_rows) * problem_.num_kv_heads;
      work_.clusters.back().block_end = static_cast<int64_t>(work_.blocks.size());
    }
    const int64_t target = wanted_ == 1 ? INT64_MAX : std::max<int64_t>(cost / wanted_, 1);
    for (int64_t i = 0; i < static_cast<int64_t>(work_.clusters.size()); ++i) {
      for (int64_t head = 0; head < problem_.num_kv_heads; ++head) AddTasks(i, head, target);
    }
  }

  // Makes the last cluster the one of this sequence.
  void AddToClusters(const ListedSequence& sequence) {
    std::vector<KeyCluster>& clusters = work_.clusters;
    const int64_t begin = sequence.key_row, end = begin + sequence.num_keys;
    if (clusters.empty() || begin >= clusters.back().end_row) {
      clusters.push_back({begin, end, static_cast<int64_t>(work_.blocks.size()), 0});
    }
    clusters.back().end_row = std::max(clusters.back().end_row, end);
  }

  int64_t AddBlocks(const ListedSequence& sequence, int64_t block_rows) {
    const int64_t num_rows = sequence.num_queries * problem_.group_size;
    int64_t cost = 0;
    for (int64_t row = 0; row < num_rows; row += block_rows) {
      BackwardBlock block = {&sequence, row, std::min(row + block_rows, num_rows), 0, 0};
      block.key_begin = problem_.Visible(sequence, row / problem_.group_size).begin;
      block.key_end = std::max<int64_t>(
          block.key_begin,
          problem_.Visible(sequence, (block.row_end - 1) / problem_.group_size).end);
      cost += CostOf(block);
      work_.blocks.push_back(block);
    }
    return cost;
  }

  // Shares the blocks of a cluster out among tasks of about even cost.
  void AddTasks(int64_t cluster, int64_t kv_head, int64_t target) {
    const KeyCluster& of = work_.clusters[cluster];
    const int64_t first = NumTasks();
    BackwardTask task = {cluster, kv_head, of.block_begin, of.block_begin, 0, 0, first, 0};
    for (int64_t i = of.block_begin; i < of.block_end; ++i) {
      task.cost += CostOf(work_.blocks[i]);
      task.block_end = i + 1;
      if (task.cost < target && i + 1 < of.block_end) continue;
      work_.tasks.push_back(task);
      task.block_begin = i + 1, task.cost = 0;
      ++task.part;
    }
    for (int64_t i = first; i < NumTasks(); ++i) work_.tasks[i].num_parts = task.part;
  }

  const AttentionProblem& problem_;
  const std::vector<const ListedSequence*> sequences_;
  const int64_t wanted_;  // tasks
  BackwardTasks work_;
};

}  // namespace

float AttentionBackwardProblem::Lse(int64_t token, int64_t head) const {
  return LseAt(args->lse, token, head);
}

float AttentionBackwardProblem::GradLse(int64_t token, int64_t head) const {
  return args->grad_lse.data == nullptr ? 0.0f : LseAt(args->grad_lse, token, head);
}

flashxla_status ResolveAttentionBackward(const flashxla_attention_backward_args& args,
                                         AttentionBackwardProblem* problem) {
  flashxla_status status = CheckAttentionBackwardArguments(args);
  if (status != FLASHXLA_OK) return status;
  problem->args = &args;
  problem->forward_args = ForwardOf(args);
  status = ResolveAttention(problem->forward_args, &problem->forward);
  problem->grad_out = ViewRows(args.grad_out);
  problem->grad_q = ViewRows(args.grad_q);
  problem->grad_k = ViewRows(args.grad_k);
  problem->grad_v = ViewRows(args.grad_v);
  return status;
}

BackwardTasks MakeBackwardTasks(const AttentionBackwardProblem& problem, int64_t max_rows,
                                int64_t panel_rows, int64_t num_threads) {
  return TaskMaker(problem.forward, num_threads).Make(max_rows, panel_rows);
}

}  // namespace flashxla
