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
#else
Isa Best() { return Isa::kBaseline; }
#endif

struct Choice {
  Isa isa;
  const char* refused;  // the value of FLASHXLA_CPU_ISA if it cannot be used, else null
  Isa best;
};

Choice Choose() {
  const Isa best = Best();
  const char* named = std::getenv(kVariable);
  if (named == nullptr || named[0] == '\0') return {best, nullptr, best};
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
