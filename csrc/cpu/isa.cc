#include "cpu/isa.h"

namespace flashxla {
namespace {

Isa Detect() {
#if defined(FLASHXLA_X86)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return avx512 ? Isa::kAvx512 : Isa::kAvx2;
  }
#endif
  return Isa::kBaseline;
}

}  // namespace

Isa GetIsa() {
  static const Isa isa = Detect();
  return isa;
}

}  // namespace flashxla
