// What the index tensors of attention say, entry by entry: the sound sequences, and on request the
// first bad entry as an error. The tensors are in host memory.
//
// No inline functions, as in cpu/attention_problem.h.
#ifndef FLASHXLA_CSRC_COMMON_INDEX_CHECKS_H_
#define FLASHXLA_CSRC_COMMON_INDEX_CHECKS_H_

#include <cstdint>
#include <vector>

#include "flashxla/attention.h"
#include "flashxla/common.h"

namespace flashxla {

// A sequence whose index entries are sound.
struct Sequence {
  int64_t index;        // its row in the index tensors
  int64_t first_query;  // row of q
  int64_t num_queries;
  int64_t length;     // len_k, which aligns queries with keys
  int64_t first_key;  // keys [first_key, num_keys) can be seen
  int64_t num_keys;
  int64_t key_row;  // dense: row of k where the sequence starts
};

// Entry of a block table.
int64_t TableEntry(const flashxla_tensor& table, int64_t sequence, int64_t page);

// Lists the sound sequences that have queries, in the order of their queries. Of `args`, reads the
// index tensors only. Dense keys are one block of all their tokens. With `check`, the first bad
// entry is the result.
flashxla_status ReadSequences(const flashxla_attention_args& args, int64_t num_blocks,
                              int64_t block_size, bool check, std::vector<Sequence>* sequences);

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_COMMON_INDEX_CHECKS_H_
