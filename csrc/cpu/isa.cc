#include "cpu/isa.h"

#include <cstdlib>
#include <cstring>

#include "common/error.h"

#if defined(FLASHXLA_X86)
#include <cpuid.h>
#endif

namespace flashxla {
namespace {

constexpr const char* kNames[] = {"baseline", "avx2", "avx512", "avx512_bf16"};  // by Isa
constexpr const char* kVariable = "FLASHXLA_CPU_ISA";

#if defined(FLASHXLA_X86)
// Asked by hand: __builtin_cpu_supports needs a table that not every compiler's library fills in,
// and Clang's does not know f16c.
Isa Best() {
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return Isa::kBaseline;
  constexpr unsigned kAvx = bit_FMA | bit_OSXSAVE | bit_AVX | bit_F16C;
  if ((ecx & kAvx) != kAvx) return Isa::kBaseline;
  // Which registers the operating system keeps when it switches threads: XCR0, with a bit for each
  // kind. 1, 2: SSE and AVX; 5 to 7: masks and the vectors of AVX-512.
  unsigned kept, high;
  asm("xgetbv" : "=a"(kept), "=d"(high) : "c"(0));
  constexpr unsigned kVectors = 0x06, kWideVectors = 0xe6;
  if ((kept & kVectors) != kVectors) return Isa::kBaseline;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return Isa::kBaseline;
  if ((ebx & bit_AVX2) == 0) return Isa::kBaseline;
  constexpr unsigned kAvx512 = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
  const bool avx512 = (kept & kWideVectors) == kWideVectors && (ebx & kAvx512) == kAvx512;
  if (!avx512) return Isa::kAvx2;
  constexpr unsigned kBf16 = 1 << 5;  // GCC and Clang have different names for it
  const bool bf16 = __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & kBf16) != 0;
  return bf16 ? Isa::kAvx512Bf16 : Isa::kAvx512;
}

// Whether products of bfloat16 pairs are faster than those of floats. An Emerald Rapids does four
// products of floats in the time of one of pairs, so that prefill took 1.7 times as long with them.
// Intel means processors with AMX to multiply bfloat16 by that; AMD has nothing else for it.
bool PairsAreFast() {
  unsigned eax, vendor[3];  // ebx, ecx, edx
  if (!__get_cpuid(0, &eax, &vendor[0], &vendor[1], &vendor[2])) return false;
  return std::memcmp(vendor, "AuthcAMDenti", sizeof(vendor)) == 0;
}
#else
Isa Best() { return Isa::kBaseline; }
bool PairsAreFast() { return false; }
#endif

struct Choice {
  Isa isa;
  const char* refused;  // the value of FLASHXLA_CPU_ISA if it cannot be used, else null
  Isa best;             // of those that this machine supports
};

Choice Choose() {
  const Isa best = Best();
  const char* named = std::getenv(kVariable);
  if (named == nullptr || named[0] == '\0') {
    const bool pairs = best == Isa::kAvx512Bf16;
    return {pairs && !PairsAreFast() ? Isa::kAvx512 : best, nullptr, best};
  }
  for (int i = 0; i <= static_cast<int>(best); ++i) {
    if (std::strcmp(named, kNames[i]) == 0) return {static_cast<Isa>(i), nullptr, best};
  }
  return {Isa::kBaseline, named, best};
}

const Choice& TheChoice() {
  static const Choice choice = Choose();
  return choice;
}

}  // namespace

Isa GetIsa() { return TheChoice().isa; }

flashxla_status CheckIsa() {
  const Choice& choice = TheChoice();
  if (choice.refused == nullptr) return FLASHXLA_OK;
  constexpr const char* kAccepted[] = {"baseline", "baseline, avx2", "baseline, avx2, avx512",
                                       "baseline, avx2, avx512, avx512_bf16"};
  return SetError(FLASHXLA_INVALID_ARGUMENT, "%s: got '%.64s'; accepted on this machine: %s",
                  kVariable, choice.refused, kAccepted[static_cast<int>(choice.best)]);
}

}  // namespace flashxla

const char* flashxla_cpu_instruction_set() {
  using namespace flashxla;
  return CheckIsa() == FLASHXLA_OK ? kNames[static_cast<int>(GetIsa())] : nullptr;
}
