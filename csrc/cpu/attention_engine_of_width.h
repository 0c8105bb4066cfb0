// The engine of the including file's FLASHXLA_VECTOR_WIDTH.
#ifndef FLASHXLA_CSRC_CPU_ATTENTION_ENGINE_OF_WIDTH_H_
#define FLASHXLA_CSRC_CPU_ATTENTION_ENGINE_OF_WIDTH_H_

#include "cpu/attention_few_rows.h"
#include "cpu/attention_tiles.h"

namespace flashxla {
namespace {

constexpr AttentionEngine kEngine = {AttendTiles,   kPanelRows,         MaxTileRows,
                                     AttendFewRows, kMaxFewRows,        kMaxFewRowsTask,
                                     kWidth,        TileScratch::Bytes, sizeof(FewRowsScratch)};

}  // namespace
}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CPU_ATTENTION_ENGINE_OF_WIDTH_H_
