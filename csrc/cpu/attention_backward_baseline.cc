// Attention's gradients for any machine.
#define FLASHXLA_VECTOR_WIDTH 4

#include "cpu/attention_backward_tiles.h"

namespace flashxla {

const AttentionBackwardEngine& BaselineAttentionBackward() { return kBackward; }

}  // namespace flashxla
