// Attention's gradients for x86-64 with AVX2, FMA and F16C.
#if defined(FLASHXLA_X86)

#define FLASHXLA_VECTOR_WIDTH 8

#include "cpu/attention_backward_tiles.h"

namespace flashxla {

const AttentionBackwardEngine& Avx2AttentionBackward() { return kBackward; }

}  // namespace flashxla

#endif  // FLASHXLA_X86
