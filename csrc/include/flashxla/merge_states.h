// flashxla C ABI: merging two attention results over disjoint sets of keys.
#ifndef FLASHXLA_MERGE_STATES_H_
#define FLASHXLA_MERGE_STATES_H_

#include "flashxla/common.h"

#ifdef __cplusplus
extern "C" {
#endif

// lse = logaddexp(lse_a, lse_b); out = (w_a * out_a + w_b * out_b) / (w_a + w_b) with the weights
// w = exp(lse_of_the_part - max(lse_a, lse_b)).
// An lse of -inf or +inf marks an empty part, whose out is not used. Both empty: out 0, lse -inf.
typedef struct flashxla_merge_states_args {
  flashxla_tensor out_a;  // [T, H, D] f32, f16, bf16
  flashxla_tensor lse_a;  // f32 [H, T]
  flashxla_tensor out_b;  // as out_a
  flashxla_tensor lse_b;  // f32 [H, T]
  flashxla_tensor out;    // as out_a
  flashxla_tensor lse;    // f32 [H, T]
} flashxla_merge_states_args;

FLASHXLA_EXPORT flashxla_status flashxla_cpu_merge_states(const flashxla_merge_states_args* args,
                                                          const flashxla_context* context);
FLASHXLA_EXPORT flashxla_status flashxla_cuda_merge_states(const flashxla_merge_states_args* args,
                                                           const flashxla_context* context);

#ifdef __cplusplus
}
#endif

#endif  // FLASHXLA_MERGE_STATES_H_
