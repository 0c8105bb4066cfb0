// Sizes in whole units.
#ifndef FLASHXLA_CSRC_COMMON_ROUND_UP_H_
#define FLASHXLA_CSRC_COMMON_ROUND_UP_H_

#include <cstdint>

namespace flashxla {

inline int64_t RoundUp(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_COMMON_ROUND_UP_H_
