// The slots of new keys for a call without slot_mapping, from the block table.
#include "cuda/attention/plan.cuh"
#include "cuda/launch.h"

namespace flashxla::attention {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) SlotsKernel(const __grid_constant__ PlanProblem p) {
  TriggerNext();
  WaitForPrevious();
  const PlanLayout layout = p.layout();
  const int64_t token = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (token >= p.index.num_tokens) return;
  const int32_t mark = p.plan[layout.token_sequence() + token];
  int64_t slot = -1;
  if (mark != kNoSequence) {
    const int32_t i = SequenceOfMark(mark);
    const Sequence s = reinterpret_cast<const ListedSequence*>(p.plan + layout.sequences())[i];
    slot = SlotOfQuery(p.index, i, s, token - s.first_query);
  }
  reinterpret_cast<int64_t*>(p.plan + layout.slots())[token] = slot;
}

}  // namespace

void LaunchSlots(const PlanProblem& p, cudaStream_t stream) {
  const int blocks = (p.index.num_tokens + kThreads - 1) / kThreads;
  LaunchDependent(SlotsKernel, blocks, kThreads, 0, stream, p);
}

}  // namespace flashxla::attention
