// The engines of attention on NVIDIA GPUs, and the one table that says which serves what.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_ENGINES_H_
#define FLASHXLA_CSRC_CUDA_ATTENTION_ENGINES_H_

#include <cuda_runtime.h>

#include "cuda/attention/problem.cuh"
#include "cuda/launch.h"
#include "flashxla/attention.h"

namespace flashxla::attention {

// What serves a call, from static facts alone.
struct Choice {
  int64_t engines;     // EngineBits, and the blocks of kSplit
  const char* reason;  // why not kWide; empty if it is used
};
Choice ChooseEngines(const flashxla_attention_args& args);  // of sound sizes

// Whether kWide can serve a call that has what kTile's tensor cores need; if not, why.
const char* WhyNotWide(const Problem& problem);

// Blocks of kSplit for each KV head.
int SplitBlocks(int64_t head_size, int num_kv_heads);
int64_t SplitSharedBytes(int64_t head_size, bool fp8);

// Each launches the work that the plan lists for it; nothing for an empty list. They write the rows
// of their sequences (kSplit: those that it does not share out; LaunchFinish merges the others).
void LaunchPlan(const flashxla_attention_plan_args& args, cudaStream_t stream);
void LaunchSplit(const Problem& problem, int64_t engines, float* workspace, cudaStream_t stream);
void LaunchTile(const Problem& problem, cudaStream_t stream);  // tensor cores
void LaunchSimt(const Problem& problem, cudaStream_t stream);  // CUDA cores: f32 queries
bool LaunchWide(const Problem& problem, cudaStream_t stream);  // false: a tensor map is refused
// Merges what LaunchSplit shared out, and writes the rows outside every sequence: 0, LSE -inf.
void LaunchFinish(const Problem& problem, int64_t engines, float* workspace, cudaStream_t stream);

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_ENGINES_H_
