// One call of attention's gradients, resolved, and cut into tasks.
//
// No inline functions, as in attention_problem.h.
#ifndef FLASHXLA_CSRC_CPU_ATTENTION_BACKWARD_PROBLEM_H_
#define FLASHXLA_CSRC_CPU_ATTENTION_BACKWARD_PROBLEM_H_

#include <cstdint>
#include <vector>

#include "cpu/attention_problem.h"
#include "flashxla/attention_backward.h"

namespace flashxla {

// Not to be copied: `forward` points to `forward_args`.
struct AttentionBackwardProblem {
  const flashxla_attention_backward_args* args;
  flashxla_attention_args forward_args;
  AttentionProblem forward;
  RowView grad_out, grad_q, grad_k, grad_v;

  float Lse(int64_t token, int64_t head) const;
  float GradLse(int64_t token, int64_t head) const;  // 0 without one
};

// Fills in all but the sequences. Refuses what the kernels do not support.
flashxla_status ResolveAttentionBackward(const flashxla_attention_backward_args& args,
                                         AttentionBackwardProblem* problem);

// Rows of each KV head, numbered as in attention_engine.h, and the keys that some of them see.
struct BackwardBlock {
  const ListedSequence* sequence;
  int64_t row_begin, row_end;
  int64_t key_begin, key_end;  // positions
};

// Sequences whose keys overlap: their gradients add up. Mostly a cluster is one sequence.
struct KeyCluster {
  int64_t first_row, end_row;  // rows of k
  int64_t block_begin, block_end;
};

// Sums of the gradients of keys and values, in float. Row r of k is at r - first_row.
struct KeyGradients {
  float *keys, *values;
  int64_t first_row;
  int64_t key_stride, value_stride;
};

// Blocks of one cluster and one KV head, and the rows of k that they see. Where there are too few
// clusters for the threads, several tasks share a cluster's blocks; their sums are added up later.
struct BackwardTask {
  int64_t cluster, kv_head;
  int64_t block_begin, block_end;
  int64_t first_row, end_row;
  int64_t num_parts;  // tasks of this cluster and head, which are neighbours
  int64_t cost;
};

struct BackwardTasks {
  std::vector<BackwardBlock> blocks;
  std::vector<KeyCluster> clusters;
  std::vector<BackwardTask> tasks;
};

// Cuts the call into enough tasks to keep `num_threads` threads busy, as far as the memory of
// shared clusters' sums stays in proportion. Blocks have at most max_rows rows, and are not cut
// into smaller ones than panel_rows.
BackwardTasks MakeBackwardTasks(const AttentionBackwardProblem& problem, int64_t max_rows,
                                int64_t panel_rows, int64_t num_threads);

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CPU_ATTENTION_BACKWARD_PROBLEM_H_
