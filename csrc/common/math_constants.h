// Constants that convert between natural and base-2 logarithms.
#ifndef FLASHXLA_CSRC_COMMON_MATH_CONSTANTS_H_
#define FLASHXLA_CSRC_COMMON_MATH_CONSTANTS_H_

namespace flashxla {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_COMMON_MATH_CONSTANTS_H_
