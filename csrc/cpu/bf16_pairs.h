// Products of bfloat16 numbers in pairs: AVX-512's instruction multiplies two numbers of each lane
// with two others, and adds both products to a float. It takes denormal numbers as zero.
#ifndef FLASHXLA_CSRC_CPU_BF16_PAIRS_H_
#define FLASHXLA_CSRC_CPU_BF16_PAIRS_H_

#include "cpu/simd.h"

namespace flashxla {
namespace {

static_assert(kWidth == 16);

// Formats of which every number is one of bfloat16's too.
template <typename Format>
constexpr bool kFitsBf16 = false;
template <>
constexpr bool kFitsBf16<BF16> = true;
template <>
constexpr bool kFitsBf16<F8E4M3> = true;
template <>
constexpr bool kFitsBf16<F8E5M2> = true;

inline bool FitsBf16(int64_t dtype) {
  bool fits = false;
  WithFormat(dtype, [&](auto format) { fits = kFitsBf16<decltype(format)>; });
  return fits;
}

// 16 pairs; the first of each is in the lower half of its lane.
using Pairs = Uint;
using UnalignedPairs __attribute__((aligned(4), may_alias)) = Pairs;

inline Pairs LoadPairs(const void* p) { return *static_cast<const UnalignedPairs*>(p); }
inline void StorePairs(void* p, Pairs x) { *static_cast<UnalignedPairs*>(p) = x; }

// The pair at p, in every lane.
inline Pairs SplatPair(const void* p) {
  uint32_t pair;
  __builtin_memcpy(&pair, p, sizeof(pair));
  return pair - Pairs{};
}

inline Float AddProducts(Float sum, Pairs a, Pairs b) {
  return (Float)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

// Rounds to bfloat16.
inline Half Round(Float x) { return (Half)_mm512_cvtneps_pbh((__m512)x); }

inline Pairs Pair(Half first, Half second) {
  return (Pairs)Widen(first) | (Pairs)Widen(second) << 16;
}
inline Pairs WithoutFirst(Pairs x) { return x & 0xffff0000u; }
inline Pairs WithoutSecond(Pairs x) { return x & 0xffffu; }

inline void StoreHalves(uint16_t* p, Half x) { __builtin_memcpy(p, &x, sizeof(x)); }

// Loads kWidth elements of a format that fits.
template <typename Format>
inline Half LoadHalvesAs(const typename Format::Bits* p) {
  if constexpr (sizeof(*p) == sizeof(uint16_t)) {
    return LoadHalves(p);
  } else {
    return Round(LoadAs<Format>(p));
  }
}

// Loads a strided row as bfloat16, with zeros up to n rounded up to kWidth. Returns whether all
// elements are finite.
template <typename Format>
bool LoadBf16Row(const char* bytes, int64_t stride, int64_t n, uint16_t* dst) {
  const auto* src = reinterpret_cast<const typename Format::Bits*>(bytes);
  constexpr uint16_t kMagnitude = 0x7fff, kInfinite = 0x7f80;
  int64_t i = 0;
  Half special = {};
  if (stride == 1) {
    for (; i + kWidth <= n; i += kWidth) {
      const Half x = LoadHalvesAs<Format>(src + i);
      special |= (Half)((x & kMagnitude) >= kInfinite);
      StoreHalves(dst + i, x);
    }
  }
  if (i < n) StoreHalves(dst + (n - 1) / kWidth * kWidth, Half{});
  for (; i < n; ++i) {
    dst[i] = static_cast<uint16_t>(BitsOf(Format::Decode(src[i * stride])) >> 16);
    if ((dst[i] & kMagnitude) >= kInfinite) special[0] = 1;
  }
  const Half none = {};
  return __builtin_memcmp(&special, &none, sizeof(none)) == 0;
}

}  // namespace
}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CPU_BF16_PAIRS_H_
