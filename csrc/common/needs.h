// Filling in what a call needs (flashxla_needs).
#ifndef FLASHXLA_CSRC_COMMON_NEEDS_H_
#define FLASHXLA_CSRC_COMMON_NEEDS_H_

#include "flashxla/common.h"

namespace flashxla {

// The reason of a call with batch_invariant.
constexpr const char* kWhyOneKernel = "batch_invariant: one kernel adds up every row in one order";

inline void AddKernel(flashxla_needs* needs, const flashxla_kernel& kernel) {
  if (needs->num_kernels < FLASHXLA_MAX_KERNELS) needs->kernels[needs->num_kernels++] = kernel;
}

// For an operation of one kernel, without a plan or workspace. True: the call only asks what it
// needs or for its plan, and has its answer.
inline bool IsAnswered(const flashxla_context* context, const char* name, const char* description) {
  if (context == nullptr || (context->needs == nullptr && context->prepare == 0)) return false;
  if (context->needs != nullptr) {
    *context->needs = {};
    AddKernel(context->needs, {"all", name, description, ""});
  }
  return true;
}

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_COMMON_NEEDS_H_
