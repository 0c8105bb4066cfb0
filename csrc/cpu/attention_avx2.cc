// The attention engines for x86-64 with AVX2, FMA and F16C.
#if defined(FLASHXLA_X86)

#define FLASHXLA_VECTOR_WIDTH 8

#include "cpu/attention_engine_of_width.h"

namespace flashxla {

const AttentionEngines& Avx2AttentionEngines() { return kEngines; }

}  // namespace flashxla

#endif  // FLASHXLA_X86
