#include "common/error.h"
#include "common/needs.h"
#include "flashxla/attention_backward.h"

// A program may be compiled for several platforms, and run on one that has the kernel.
flashxla_status flashxla_cuda_attention_backward(const flashxla_attention_backward_args*,
                                                 const flashxla_context* context) {
  using namespace flashxla;
  if (IsAnswered(context, "none", "gradients have no kernel for NVIDIA GPUs yet")) {
    return FLASHXLA_OK;
  }
  return SetError(FLASHXLA_INVALID_ARGUMENT,
                  "gradients have no kernel for NVIDIA GPUs yet; accepted: tensors on a CPU");
}
