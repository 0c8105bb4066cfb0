// Reading attention's index tensors in host memory: lists the sound sequences and, on request,
// reports the first bad entry as an error.
#ifndef FLASHXLA_CSRC_COMMON_INDEX_CHECKS_H_
#define FLASHXLA_CSRC_COMMON_INDEX_CHECKS_H_

#include <cstdint>
#include <vector>

#include "common/sequences.h"
#include "flashxla/attention.h"

namespace flashxla {

// A sound sequence, and its row in the index tensors.
struct ListedSequence : Sequence {
  int64_t index;
};

// Lists the sound sequences that have queries, in the order of their queries. Of the tensors, reads
// only the index tensors. With `check`, returns an error for the first bad entry.
flashxla_status ReadSequences(const flashxla_attention_args& args, bool check,
                              std::vector<ListedSequence>* sequences);

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_COMMON_INDEX_CHECKS_H_
