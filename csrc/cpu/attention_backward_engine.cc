#include "cpu/attention_backward_engine.h"

#include "cpu/isa.h"

namespace flashxla {

const AttentionBackwardEngine& GetAttentionBackward() {
#if defined(FLASHXLA_X86)
  switch (GetIsa()) {
    case Isa::kAvx512:
      return Avx512AttentionBackward();
    case Isa::kAvx2:
      return Avx2AttentionBackward();
    case Isa::kBaseline:
      break;
  }
#endif
  return BaselineAttentionBackward();
}

}  // namespace flashxla
