#include "cpu/attention_engine.h"

namespace flashxla {

const AttentionEngine& GetAttentionEngine() {
#if defined(FLASHXLA_X86)
  static const AttentionEngine& engine = []() -> const AttentionEngine& {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c")) {
      return Avx512AttentionEngine();
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c")) {
      return Avx2AttentionEngine();
    }
    return BaselineAttentionEngine();
  }();
  return engine;
#else
  return BaselineAttentionEngine();
#endif
}

}  // namespace flashxla
