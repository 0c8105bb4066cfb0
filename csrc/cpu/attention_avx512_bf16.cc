// The attention engines for x86-64 with AVX-512's instructions for bfloat16: those of
// attention_avx512.cc, and tiles of their own where all numbers are bfloat16's. Decode has none:
// reading memory takes its time.
#if defined(FLASHXLA_X86)

#define FLASHXLA_VECTOR_WIDTH 16

#include "cpu/attention_tiles_bf16.h"

namespace flashxla {
namespace {

void AttendTilesOfAny(const AttentionProblem& problem, const AttentionTask& task, void* scratch) {
  const bool bf16 = FitsBf16(problem.args->kv_dtype) && FitsBf16(problem.q.dtype);
  const auto attend = bf16 ? AttendTilesBf16 : Avx512AttentionEngines().tiles.attend;
  attend(problem, task, scratch);
}

AttentionEngines MakeEngines() {
  AttentionEngines engines = Avx512AttentionEngines();
  engines.tiles.attend = AttendTilesOfAny;
  return engines;
}

}  // namespace

const AttentionEngines& Avx512Bf16AttentionEngines() {
  static const AttentionEngines engines = MakeEngines();
  return engines;
}

}  // namespace flashxla

#endif  // FLASHXLA_X86
