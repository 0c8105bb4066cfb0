// Checks and views of the arguments of attention's gradients, the same on every platform.
#ifndef FLASHXLA_CSRC_COMMON_ATTENTION_BACKWARD_ARGUMENTS_H_
#define FLASHXLA_CSRC_COMMON_ATTENTION_BACKWARD_ARGUMENTS_H_

#include "flashxla/attention.h"
#include "flashxla/attention_backward.h"

namespace flashxla {

// The call whose gradients these are. Its out and lse are read here.
flashxla_attention_args ForwardOf(const flashxla_attention_backward_args& args);

// Refuses what the kernels do not support, and shapes that do not go together. A call is memory
// safe if it passes, and if its ForwardOf passes CheckAttentionArguments.
flashxla_status CheckAttentionBackwardArguments(const flashxla_attention_backward_args& args);

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_COMMON_ATTENTION_BACKWARD_ARGUMENTS_H_
