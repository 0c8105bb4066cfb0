#include "cpu/isa.h"

#include "flashxla/common.h"

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

const char* flashxla_cpu_instruction_set() {
  switch (flashxla::GetIsa()) {
    case flashxla::Isa::kAvx512:
      return "avx512";
    case flashxla::Isa::kAvx2:
      return "avx2";
    case flashxla::Isa::kBaseline:
      break;
  }
  return "baseline";
}
