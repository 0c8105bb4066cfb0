#include "cpu/isa.h"

#include <cstdlib>
#include <cstring>

#include "common/error.h"

#if defined(FLASHXLA_X86)
#include <cpuid.h>
#endif

namespace flashxla {
namespace {

constexpr const char* kNames[] = {"baseline", "avx2", "avx512"};  // by Isa
constexpr const char* kVariable = "FLASHXLA_CPU_ISA";

Isa Best() {
#if defined(FLASHXLA_X86)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  // Clang's __builtin_cpu_supports does not know f16c.
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c) {
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return avx512 ? Isa::kAvx512 : Isa::kAvx2;
  }
#endif
  return Isa::kBaseline;
}

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
  constexpr const char* kAccepted[] = {"baseline", "baseline, avx2", "baseline, avx2, avx512"};
  return SetError(FLASHXLA_INVALID_ARGUMENT, "%s: got '%.64s'; accepted on this machine: %s",
                  kVariable, choice.refused, kAccepted[static_cast<int>(choice.best)]);
}

}  // namespace flashxla

const char* flashxla_cpu_instruction_set() {
  using namespace flashxla;
  return CheckIsa() == FLASHXLA_OK ? kNames[static_cast<int>(GetIsa())] : nullptr;
}
