#include "cpu/attention_engine.h"

#include "common/needs.h"
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

const char* WhyNoFewRows(const AttentionEngines& engines, const AttentionProblem& problem) {
  // It adds up in another order than tiles.
  if (problem.args->batch_invariant != 0) return kWhyOneKernel;
  return engines.why_not_few_rows(problem);
}

}  // namespace flashxla
