// How merge_states weighs its two inputs.
#ifndef FLASHXLA_CSRC_COMMON_MERGE_WEIGHTS_H_
#define FLASHXLA_CSRC_COMMON_MERGE_WEIGHTS_H_

#include <cmath>

#include "common/host_device.h"

namespace flashxla {

struct MergeWeights {
  float lse;   // of the result
  float a, b;  // they add up to 1, or are both 0
};

// The weights of two rows with these LSEs. An LSE of -inf or +inf marks an empty part.
FLASHXLA_HOST_DEVICE MergeWeights WeightsOf(float lse_a, float lse_b) {
  if (std::isinf(lse_a)) lse_a = -INFINITY;
  if (std::isinf(lse_b)) lse_b = -INFINITY;
  MergeWeights weights = {-INFINITY, 0.0f, 0.0f};
  if (lse_a != -INFINITY || lse_b != -INFINITY) {
    const float lse_max = lse_a < lse_b ? lse_b : lse_a;
    weights.a = expf(lse_a - lse_max), weights.b = expf(lse_b - lse_max);
    const float sum = weights.a + weights.b;
    weights.lse = lse_max + logf(sum);
    // Not exp(lse_a - lse): the rounding of a large lse would become an error of the weights.
    weights.a /= sum, weights.b /= sum;
  }
  return weights;
}

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_COMMON_MERGE_WEIGHTS_H_
