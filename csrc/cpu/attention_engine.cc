#include "cpu/attention_engine.h"

#include "cpu/isa.h"

namespace flashxla {

const AttentionEngine& GetAttentionEngine() {
#if defined(FLASHXLA_X86)
  switch (GetIsa()) {
    case Isa::kAvx512:
      return Avx512AttentionEngine();
    case Isa::kAvx2:
      return Avx2AttentionEngine();
    case Isa::kBaseline:
      break;
  }
#endif
  return BaselineAttentionEngine();
}

}  // namespace flashxla
