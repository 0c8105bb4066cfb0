// The attention engines for x86-64 with AVX-512 F, BW, DQ and VL.
#if defined(FLASHXLA_X86)

#define FLASHXLA_VECTOR_WIDTH 16

#include "cpu/attention_engine_of_width.h"

namespace flashxla {

const AttentionEngines& Avx512AttentionEngines() { return kEngines; }

}  // namespace flashxla

#endif  // FLASHXLA_X86
