// The engines for vectors of FLASHXLA_VECTOR_WIDTH floats, which the including file defines.
#ifndef FLASHXLA_CSRC_CPU_ATTENTION_ENGINE_OF_WIDTH_H_
#define FLASHXLA_CSRC_CPU_ATTENTION_ENGINE_OF_WIDTH_H_

#include "cpu/attention_backward_tiles.h"
#include "cpu/attention_few_rows.h"
#include "cpu/attention_tiles.h"

namespace flashxla {
namespace {

constexpr AttentionEngines kEngines = {
    {"few_rows", "streams keys and values once, split-KV", AttendFewRows, FewRowsScratchBytes},
    kMaxFewRows,
    kMaxFewRowsTask,
    WhyNotFewRows,
    {"tiles", "tiles of queries and keys", AttendTiles, TileScratchBytes},
    kPanelRows,
    MaxTileRows,
    kBackward,
};

}  // namespace
}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CPU_ATTENTION_ENGINE_OF_WIDTH_H_
