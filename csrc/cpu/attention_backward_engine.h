// The vectorized part of attention's gradients, compiled once per instruction set.
#ifndef FLASHXLA_CSRC_CPU_ATTENTION_BACKWARD_ENGINE_H_
#define FLASHXLA_CSRC_CPU_ATTENTION_BACKWARD_ENGINE_H_

#include <cstdint>

#include "cpu/attention_backward_problem.h"

namespace flashxla {

// The rows of sums are padded to a multiple of this, so that every engine adds whole vectors; and
// behind the last row is room for this many.
constexpr int64_t kGradientBlock = 32;
constexpr int64_t kGradientSpareRows = 8;

struct AttentionBackwardEngine {
  const char* name;
  const char* description;
  // Writes grad_q of a block's rows, adds to the sums of its keys' gradients, and to grad_sinks[h]
  // of each head of the KV head's group.
  void (*run)(const AttentionBackwardProblem& problem, const BackwardBlock& block, int64_t kv_head,
              const KeyGradients& sums, double* grad_sinks, void* scratch);
  int64_t (*scratch_bytes)(const AttentionProblem& problem);  // for each worker, 64-byte aligned
  int64_t (*max_rows)(const AttentionProblem& problem);       // of a block
  int64_t panel_rows;                                         // rows computed together
};

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CPU_ATTENTION_BACKWARD_ENGINE_H_
