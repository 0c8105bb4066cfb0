// flashxla C ABI: merging two attention results over disjoint sets of keys.
#ifndef FLASHXLA_MERGE_STATES_H_
#define FLASHXLA_MERGE_STATES_H_

#include "flashxla/operation.h"

// lse = logaddexp(lse_a, lse_b); out = (w_a * out_a + w_b * out_b) / (w_a + w_b) with the weights
// w = exp(lse_of_the_part - max(lse_a, lse_b)).
// An lse of -inf or +inf marks an empty part, whose out is not used. Both empty: out 0, lse -inf.
#define FLASHXLA_MERGE_STATES_FIELDS(F)                            \
  F(INPUT, out_a, NONE) /* [T, H, D] float32, float16, bfloat16 */ \
  F(INPUT, lse_a, NONE) /* float32 [H, T] */                       \
  F(INPUT, out_b, NONE) /* as out_a */                             \
  F(INPUT, lse_b, NONE) /* float32 [H, T] */                       \
  F(RESULT, out, NONE)  /* as out_a */                             \
  F(RESULT, lse, NONE)  /* float32 [H, T] */

FLASHXLA_OPERATION(merge_states, FLASHXLA_MERGE_STATES_FIELDS);

#endif  // FLASHXLA_MERGE_STATES_H_
