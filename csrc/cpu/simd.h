// Vectors of floats, with the compiler's vector extensions.
//
// The including file defines FLASHXLA_VECTOR_WIDTH. Everything has internal linkage, and nothing
// here may use inline functions of the standard library: this header is compiled with different
// instruction sets, and the linker must not pick one translation unit's copy for another.
#ifndef FLASHXLA_CSRC_CPU_SIMD_H_
#define FLASHXLA_CSRC_CPU_SIMD_H_

#include <cstdint>
#include <utility>

#include "cpu/dtypes.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace flashxla {
namespace {

constexpr int kWidth = FLASHXLA_VECTOR_WIDTH;
constexpr float kInfinity = __builtin_inff();

using Float = float __attribute__((vector_size(4 * kWidth)));
using Int = int32_t __attribute__((vector_size(4 * kWidth)));
using Uint = uint32_t __attribute__((vector_size(4 * kWidth)));
using UnalignedFloat __attribute__((aligned(4), may_alias)) = Float;
using UnalignedInt __attribute__((aligned(4), may_alias)) = Int;

template <typename T>
inline T Min(T a, T b) {
  return a < b ? a : b;
}
template <typename T>
inline T Max(T a, T b) {
  return a > b ? a : b;
}

inline Float Splat(float x) { return x - Float{}; }
inline Int SplatInt(int32_t x) { return x - Int{}; }
inline Int Lanes() {
  Int lanes;
  for (int i = 0; i < kWidth; ++i) lanes[i] = i;
  return lanes;
}

// Picks lanes by number: those of a come first, then those of b.
template <int... kLanes>
inline Float Shuffle(Float a, Float b) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, kLanes...);
#else
  return __builtin_shuffle(a, b, Int{kLanes...});
#endif
}

// Of every block of kBlock lanes, the first half comes from a's half at kOffset, the second from
// b's.
template <int kBlock, int kOffset>
constexpr int HalfBlockLane(int lane) {
  return (lane / kBlock) * kBlock + kOffset + (lane % kBlock) % (kBlock / 2) +
         (lane % kBlock < kBlock / 2 ? 0 : kWidth);
}

template <int kBlock, int kOffset, int... kLanes>
inline Float HalfBlocks(Float a, Float b, std::integer_sequence<int, kLanes...>) {
  return Shuffle<HalfBlockLane<kBlock, kOffset>(kLanes)...>(a, b);
}
template <int kBlock, int kOffset>
inline Float HalfBlocks(Float a, Float b) {
  return HalfBlocks<kBlock, kOffset>(a, b, std::make_integer_sequence<int, kWidth>());
}

// Lane i of x[j] and lane j of x[i] change places.
template <int kBlock = kWidth>
inline void Transpose(Float* x) {
  if constexpr (kBlock > 1) {
    constexpr int kHalf = kBlock / 2;
    for (int i = 0; i < kWidth; ++i) {
      if (i % kBlock >= kHalf) continue;
      const Float a = x[i], b = x[i + kHalf];
      x[i] = HalfBlocks<kBlock, 0>(a, b);
      x[i + kHalf] = HalfBlocks<kBlock, kHalf>(a, b);
    }
    Transpose<kHalf>(x);
  }
}

inline Float Load(const float* p) { return *reinterpret_cast<const UnalignedFloat*>(p); }
inline Int Load(const int32_t* p) { return *reinterpret_cast<const UnalignedInt*>(p); }
inline void Store(float* p, Float x) { *reinterpret_cast<UnalignedFloat*>(p) = x; }

// Loads kWidth elements of a storage format (dtypes.h).
template <typename Format>
inline Float LoadAs(const typename Format::Bits* p) {
  Float x;
  for (int i = 0; i < kWidth; ++i) x[i] = Format::Decode(p[i]);
  return x;
}

template <>
inline Float LoadAs<F32>(const float* p) {
  return Load(p);
}

#if defined(__AVX2__)
using Half = uint16_t __attribute__((vector_size(2 * kWidth)));

inline Half LoadHalves(const uint16_t* p) {
  Half x;
  __builtin_memcpy(&x, p, sizeof(x));
  return x;
}

#if defined(__AVX512F__)
// Intrinsics without a mask start from an undefined vector, about which gcc 12 warns (PR 105593).
constexpr __mmask16 kAll = 0xffff;

inline Half LoadBytes(const uint8_t* p) {
  return (Half)_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Float HalvesToFloat(Half x) { return (Float)_mm512_maskz_cvtph_ps(kAll, (__m256i)x); }
inline Int Widen(Half x) { return (Int)_mm512_maskz_cvtepu16_epi32(kAll, (__m256i)x); }
#else
inline Half LoadBytes(const uint8_t* p) {
  return (Half)_mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline Float HalvesToFloat(Half x) { return (Float)_mm256_cvtph_ps((__m128i)x); }
inline Int Widen(Half x) { return (Int)_mm256_cvtepu16_epi32((__m128i)x); }
#endif

template <>
inline Float LoadAs<BF16>(const uint16_t* p) {
  return (Float)(Widen(LoadHalves(p)) << 16);
}

template <>
inline Float LoadAs<F16>(const uint16_t* p) {
  return HalvesToFloat(LoadHalves(p));
}

template <>
inline Float LoadAs<F8E5M2>(const uint8_t* p) {
  return HalvesToFloat(LoadBytes(p) << 8);
}

// Through f16: the same bits read as f16 mean 2^-8 times the value. (The hardware's conversion from
// f16 keeps subnormals in every denormal mode.) All magnitude bits set is NaN in e4m3; or-ing in
// the comparison's mask makes it a NaN in f16 too.
template <>
inline Float LoadAs<F8E4M3>(const uint8_t* p) {
  const Half bytes = LoadBytes(p);
  const Half magnitude = bytes & 0x7f;
  const Half nan = (Half)(magnitude == 0x7f);
  return HalvesToFloat(((bytes & 0x80) << 8) | (magnitude << 7) | nan) * 256.0f;
}
#endif

// 2^x for x < 128, to 2 ulp; 0 below the smallest normal number. NaN stays NaN.
inline Float Exp2(Float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Float rounded = x + kRound;
  const Float f = x - (rounded - kRound);
  Float p = f * 1.535336188319500e-4f + 1.339887440266574e-3f;
  p = f * p + 9.618437357674640e-3f;
  p = f * p + 5.550332471162809e-2f;
  p = f * p + 2.402264791363012e-1f;
  p = f * p + 6.931472028550421e-1f;
  p = f * p + 1.0f;
  // Unsigned: it wraps around far below the range, where the result is not used.
  const Uint exponent = (Uint)rounded - (0x4b400000u - 127u);
  return x < -126.0f ? Float{} : p * (Float)(exponent << 23);
}

// tanh to a few ulp, by the rational approximation that Eigen and XLA use. NaN stays NaN.
inline Float Tanh(Float x) {
  constexpr float kLimit = 7.90531110763549805f;
  x = x > kLimit ? Splat(kLimit) : x;
  x = x < -kLimit ? Splat(-kLimit) : x;
  const Float s = x * x;
  Float p = s * -2.76076847742355e-16f + 2.00018790482477e-13f;
  p = s * p + -8.60467152213735e-11f;
  p = s * p + 5.12229709037114e-08f;
  p = s * p + 1.48572235717979e-05f;
  p = s * p + 6.37261928875436e-04f;
  p = s * p + 4.89352455891786e-03f;
  Float q = s * 1.19825839466702e-06f + 1.18534705686654e-04f;
  q = s * q + 2.26843463243900e-03f;
  q = s * q + 4.89352518554385e-03f;
  return x * p / q;
}

inline Float Abs(Float x) { return (Float)((Int)x & 0x7fffffff); }

}  // namespace
}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CPU_SIMD_H_
