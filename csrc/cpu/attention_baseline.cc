// The attention engine for any machine.
#define FLASHXLA_VECTOR_WIDTH 4

#include "cpu/attention_engine_of_width.h"

namespace flashxla {

const AttentionEngine& BaselineAttentionEngine() { return kEngine; }

}  // namespace flashxla
