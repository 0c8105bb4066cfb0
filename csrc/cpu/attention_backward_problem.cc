#include "cpu/attention_backward_problem.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/attention_backward_arguments.h"

namespace flashxla {
namespace {

// Tasks per thread where clusters are shared: with several, uneven ones balance out.
constexpr int64_t kTasksPerThread = 2;

// A cluster is shared by as many tasks as it has even shares of the work, give or take this much of
// one: three equal clusters become six tasks for two threads, and four stay four.
constexpr double kShareTolerance = 0.25;

// The sums of shared clusters have at most so many times the elements of q, k and v.
constexpr int64_t kMostPartElements = 2;

// A row costs something even where it sees no key.
constexpr int64_t kRowCost = 8;

int64_t CostOf(const BackwardBlock& block) {
  return (block.row_end - block.row_begin) * (block.key_end - block.key_begin + kRowCost);
}

// The sequences in the order of their keys.
std::vector<const ListedSequence*> ByKeys(const AttentionProblem& problem) {
  std::vector<const ListedSequence*> sequences;
  if (problem.num_heads == 0) return sequences;
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
    for (;; wanted_ /= 2) {
      // Large blocks of rows read the least memory; smaller ones keep more threads busy.
      int64_t block_rows = max_rows;
      AddAll(block_rows);
      while (too_few_blocks_ && block_rows > panel_rows) {
        block_rows = std::max(block_rows / 2, panel_rows);
        AddAll(block_rows);
      }
      if (wanted_ == 1 || PartElements() <= kMostPartElements * InputElements()) {
        return std::move(work_);
      }
    }
  }

 private:
  int64_t InputElements() const {
    return problem_.num_tokens * problem_.num_heads * problem_.head_size +
           problem_.k.block_size * problem_.num_kv_heads *
               (problem_.head_size + problem_.v_head_size);
  }

  // Of the sums of all tasks that share a cluster.
  int64_t PartElements() const {
    int64_t rows = 0;
    for (const BackwardTask& task : work_.tasks) {
      if (task.num_parts > 1) rows += task.end_row - task.first_row;
    }
    return rows * (problem_.head_size + problem_.v_head_size);
  }

  void AddAll(int64_t block_rows) {
    work_ = {};
    too_few_blocks_ = false;
    std::vector<int64_t> costs;  // of each cluster
    int64_t cost = 0;
    for (const ListedSequence* sequence : sequences_) {
      AddToClusters(*sequence);
      costs.resize(work_.clusters.size());
      const int64_t added = AddBlocks(*sequence, block_rows);
      costs.back() += added, cost += added * problem_.num_kv_heads;
      work_.clusters.back().block_end = static_cast<int64_t>(work_.blocks.size());
    }
    for (size_t i = 0; i < costs.size(); ++i) {
      const double shares = static_cast<double>(costs[i]) * wanted_ / std::max<int64_t>(cost, 1);
      const int64_t parts =
          wanted_ == 1 ? 1 : static_cast<int64_t>(std::ceil(shares - kShareTolerance));
      for (int64_t head = 0; head < problem_.num_kv_heads; ++head) {
        AddTasks(static_cast<int64_t>(i), head, costs[i], std::max<int64_t>(parts, 1));
      }
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
  void AddTasks(int64_t cluster, int64_t kv_head, int64_t cost, int64_t num_parts) {
    const KeyCluster& of = work_.clusters[cluster];
    const int64_t num_blocks = of.block_end - of.block_begin;
    too_few_blocks_ |= num_blocks < num_parts;
    num_parts = std::min(num_parts, num_blocks);
    int64_t block = of.block_begin, done = 0;
    for (int64_t part = 0; part < num_parts; ++part) {
      BackwardTask task = {cluster, kv_head, block, block, of.end_row, of.first_row, num_parts, 0};
      const int64_t left = num_parts - part - 1;  // each has a block at least
      while (block < of.block_end - left &&
             (task.cost == 0 || left == 0 || done + task.cost < cost / num_parts * (part + 1))) {
        Add(work_.blocks[block++], &task);
      }
      task.block_end = block, done += task.cost;
      task.end_row = std::max(task.end_row, task.first_row);
      work_.tasks.push_back(task);
    }
  }

  static void Add(const BackwardBlock& block, BackwardTask* task) {
    task->cost += CostOf(block);
    const int64_t row = block.sequence->key_row;
    if (block.key_begin == block.key_end) return;
    task->first_row = std::min(task->first_row, row + block.key_begin);
    task->end_row = std::max(task->end_row, row + block.key_end);
  }

  const AttentionProblem& problem_;
  const std::vector<const ListedSequence*> sequences_;
  int64_t wanted_;  // tasks
  bool too_few_blocks_ = false;
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
  problem->args = &args;
  problem->forward_args = ForwardOf(args);
  if (const flashxla_status status = ResolveAttention(problem->forward_args, &problem->forward);
      status != FLASHXLA_OK) {
    return status;
  }
  problem->grad_out = ViewRows(args.grad_out);
  problem->grad_q = ViewRows(args.grad_q);
  problem->grad_k = ViewRows(args.grad_k);
  problem->grad_v = ViewRows(args.grad_v);
  return CheckAttentionBackwardArguments(args);
}

BackwardTasks MakeBackwardTasks(const AttentionBackwardProblem& problem, int64_t max_rows,
                                int64_t panel_rows, int64_t num_threads) {
  return TaskMaker(problem.forward, num_threads).Make(max_rows, panel_rows);
}

}  // namespace flashxla
