// The attention engines for any machine.
#define FLASHXLA_VECTOR_WIDTH 4

#include "cpu/attention_engine_of_width.h"

namespace flashxla {

const AttentionEngines& BaselineAttentionEngines() { return kEngines; }

}  // namespace flashxla
