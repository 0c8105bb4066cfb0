// Which keys a query sees.
#ifndef FLASHXLA_CSRC_COMMON_VISIBILITY_H_
#define FLASHXLA_CSRC_COMMON_VISIBILITY_H_

#include <cstdint>

#include "common/host_device.h"
#include "common/sequences.h"

namespace flashxla {

// How many keys a query sees to the left and right of its own position; < 0: unlimited. A causal
// mask is right == 0.
struct Window {
  int32_t left, right;
};

FLASHXLA_HOST_DEVICE int32_t WindowSide(int64_t keys) {
  return keys < 0 || keys > INT32_MAX ? -1 : static_cast<int32_t>(keys);
}
FLASHXLA_HOST_DEVICE Window WindowOf(const flashxla_attention_args& args) {
  return {WindowSide(args.window_left), args.causal ? 0 : WindowSide(args.window_right)};
}

// Keys [begin, end) of a sequence; none if end <= begin.
struct KeyRange {
  int32_t begin, end;
};

// The keys that at least one of queries [first, last] sees. Both ends grow with first and last.
FLASHXLA_HOST_DEVICE KeyRange VisibleKeys(const Sequence& s, const Window& window, int64_t first,
                                          int64_t last) {
  const int64_t offset = int64_t{s.length} - s.num_queries;  // from a query to its own position
  int64_t begin = s.first_key, end = s.num_keys;
  if (window.left >= 0 && first + offset - window.left > begin) {
    begin = first + offset - window.left;
  }
  if (window.right >= 0 && last + offset + window.right + 1 < end) {
    end = last + offset + window.right + 1;
  }
  return {static_cast<int32_t>(begin < s.num_keys ? begin : s.num_keys),
          static_cast<int32_t>(end > 0 ? end : 0)};
}

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_COMMON_VISIBILITY_H_
