// Scalar conversions between float and the narrow formats. All rounding is to nearest even.
//
// They use integer operations and selects, so that loops over them vectorize and the results do not
// depend on the thread's denormal mode (XLA sets flush-to-zero on its threads).
//
// Everything has internal linkage: this header is compiled with different instruction sets, and
// the linker must not pick one translation unit's copy for another.
#ifndef FLASHXLA_CSRC_CPU_DTYPES_H_
#define FLASHXLA_CSRC_CPU_DTYPES_H_

#include <cstdint>
#include <cstring>

#include "flashxla/common.h"

namespace flashxla {
namespace {

inline uint32_t BitsOf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float FloatOf(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// Storage types: the bits of one element.
struct F32 {
  using Bits = float;
  static float Decode(float x) { return x; }
  static float Encode(float x) { return x; }
};

struct BF16 {
  using Bits = uint16_t;
  static float Decode(uint16_t x) { return FloatOf(uint32_t{x} << 16); }
  static uint16_t Encode(float x) {
    const uint32_t bits = BitsOf(x);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    return static_cast<uint16_t>(nan ? (bits >> 16) | 0x40 : rounded);
  }
};

// A format with a sign bit, exponent, mantissa and subnormals. Encode clamps magnitudes to `kTop`:
// infinity for f16, which overflows, and the largest finite number for the fp8 formats.
template <typename BitsType, int kWidth, int kMantissa, int kBias, uint32_t kTop, uint32_t kNaN>
struct SmallFloat {
  using Bits = BitsType;
  static constexpr int kShift = 23 - kMantissa;
  static constexpr uint32_t kSign = 1u << (kWidth - 1);
  static constexpr uint32_t kMinNormal = static_cast<uint32_t>(128 - kBias) << 23;

  static Bits Encode(float x) {
    const uint32_t bits = BitsOf(x);
    const uint32_t magnitude = bits & 0x7fffffff;
    const uint32_t sign = (bits >> (32 - kWidth)) & kSign;
    const uint32_t rounded = magnitude + ((1u << (kShift - 1)) - 1) + ((magnitude >> kShift) & 1);
    uint32_t normal = (rounded >> kShift) - (static_cast<uint32_t>(127 - kBias) << kMantissa);
    normal = normal < kTop ? normal : kTop;
    // Adding a number whose last place is the format's smallest step rounds to that step.
    constexpr uint32_t magic = static_cast<uint32_t>(127 + 24 - kMantissa - kBias) << 23;
    const uint32_t subnormal = BitsOf(FloatOf(magnitude) + FloatOf(magic)) - magic;
    uint32_t result = magnitude < kMinNormal ? subnormal : normal;
    result = magnitude > 0x7f800000 ? kNaN : result;
    return static_cast<Bits>(result | sign);
  }
};

struct F16 : SmallFloat<uint16_t, 16, 10, 15, 0x7c00, 0x7e00> {
  static float Decode(uint16_t x) {
    const uint32_t magnitude = x & 0x7fff;
    const uint32_t special = magnitude >= 0x7c00 ? 0x7f800000 : 0;
    const uint32_t normal = ((magnitude << 13) + (112u << 23)) | special;
    const uint32_t subnormal =
        BitsOf(static_cast<float>(static_cast<int32_t>(magnitude)) * (1.0f / (1 << 24)));
    const uint32_t sign = static_cast<uint32_t>(x & 0x8000) << 16;
    return FloatOf((magnitude < 0x400 ? subnormal : normal) | sign);
  }
};

struct F8E4M3 : SmallFloat<uint8_t, 8, 3, 7, 0x7e, 0x7f> {
  static float Decode(uint8_t x) {
    const uint32_t magnitude = x & 0x7f;
    const uint32_t special = magnitude == 0x7f ? 0x7fc00000 : 0;
    const uint32_t normal = ((magnitude << 20) + (120u << 23)) | special;
    const uint32_t subnormal =
        BitsOf(static_cast<float>(static_cast<int32_t>(magnitude)) * (1.0f / (1 << 9)));
    const uint32_t sign = static_cast<uint32_t>(x & 0x80) << 24;
    return FloatOf((magnitude < 8 ? subnormal : normal) | sign);
  }
};

struct F8E5M2 : SmallFloat<uint8_t, 8, 2, 15, 0x7b, 0x7e> {
  static float Decode(uint8_t x) { return F16::Decode(static_cast<uint16_t>(x << 8)); }
};

// Calls f with the storage type of `dtype`; does nothing for a dtype that is not a float format.
template <typename Function>
inline void WithFormat(int64_t dtype, Function&& f) {
  switch (dtype) {
    case FLASHXLA_F32:
      return f(F32{});
    case FLASHXLA_F16:
      return f(F16{});
    case FLASHXLA_BF16:
      return f(BF16{});
    case FLASHXLA_F8E4M3:
      return f(F8E4M3{});
    case FLASHXLA_F8E5M2:
      return f(F8E5M2{});
    default:
      return;
  }
}

}  // namespace
}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CPU_DTYPES_H_
