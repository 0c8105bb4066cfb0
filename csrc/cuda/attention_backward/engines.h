// The engines of attention's gradients, and the choice of one for a call.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_ENGINES_H_
#define FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_ENGINES_H_

#include <cuda_runtime.h>

#include "cuda/attention_backward/problem.cuh"
#include "cuda/launch.h"

namespace flashxla::attention_backward {

struct Engine {
  const char* name;
  const char* description;
  // Why the engine cannot serve a call, of which all but the plan and the contents of tensors is
  // known; "" if it can.
  const char* (*why_not)(const Problem& problem);
  int (*key_tile)(const Problem& problem);  // keys of the plan's key tiles; null: it uses none
  // How many float32 sums of a row tile of a head it needs (Problem::sums); null: none.
  int (*num_sums)(const Problem& problem);
  // Writes grad_q of all rows in sequences, and grad_k and grad_v: of all keys, or, if
  // !takes_shared_keys, of those in key tiles.
  flashxla_status (*launch)(const Problem& problem, cudaStream_t stream);
  // Otherwise it does nothing where sequences have keys in common.
  bool takes_shared_keys;
};

extern const Engine kWideEngine, kTileEngine, kTile32Engine, kGeneralEngine;

// Fills in lse2 and delta, and writes zeros to the sums.
void LaunchDelta(const Problem& problem, cudaStream_t stream);
// Writes grad_sinks, from lse2 and delta.
void LaunchSinks(const Problem& problem, cudaStream_t stream);
// Writes zeros to a tensor of any strides.
void LaunchClear(const flashxla_tensor& tensor, cudaStream_t stream);
// Writes grad_q of rows outside every sequence: 0.
void LaunchIdle(const Problem& problem, cudaStream_t stream);

}  // namespace flashxla::attention_backward

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_ENGINES_H_
