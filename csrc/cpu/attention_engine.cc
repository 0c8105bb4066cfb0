#include "cpu/attention_engine.h"

#include "cpu/isa.h"

namespace flashxla {

const AttentionEngines& GetAttentionEngines() {
#if defined(FLASHXLA_X86)
  switch (GetIsa()) {
    case Isa::kAvx512Bf16:
      return Avx512Bf16AttentionEngines();
    case Isa::kAvx512:
      return Avx512AttentionEngines();
    case Isa::kAvx2:
      return Avx2AttentionEngines();
    case Isa::kBaseline:
      break;
  }
#endif
  return BaselineAttentionEngines();
}

}  // namespace flashxla
