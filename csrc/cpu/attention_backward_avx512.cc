// Attention's gradients for x86-64 with AVX-512 F, BW, DQ and VL.
#if defined(FLASHXLA_X86)

#define FLASHXLA_VECTOR_WIDTH 16

#include "cpu/attention_backward_tiles.h"

namespace flashxla {

const AttentionBackwardEngine& Avx512AttentionBackward() { return kBackward; }

}  // namespace flashxla

#endif  // FLASHXLA_X86
