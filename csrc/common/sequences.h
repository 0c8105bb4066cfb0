// What the entries of attention's index tensors mean: which sequences are sound, which keys they
// have, and where the keys lie. flashxla/attention.h states the rules.
#ifndef FLASHXLA_CSRC_COMMON_SEQUENCES_H_
#define FLASHXLA_CSRC_COMMON_SEQUENCES_H_

#include <cstdint>

#include "common/host_device.h"
#include "flashxla/attention.h"

namespace flashxla {

// A one-dimensional index tensor, in host or device memory; null data: absent.
struct Index {
  const int32_t* data;
  int64_t stride;
};

FLASHXLA_HOST_DEVICE int32_t At(const Index& index, int64_t i) {
  return index.data[i * index.stride];
}

// The pages of each sequence; null data: dense keys, one block with all tokens.
struct BlockTable {
  const int32_t* data;
  int64_t stride_sequence, stride_page;
  int64_t num_entries;  // of all sequences, if they lie in memory without gaps; else 0
  int32_t num_blocks, block_size;
};

FLASHXLA_HOST_DEVICE int32_t Entry(const BlockTable& table, int64_t sequence, int64_t page) {
  return table.data[sequence * table.stride_sequence + page * table.stride_page];
}
FLASHXLA_HOST_DEVICE bool IsSound(const BlockTable& table, int32_t entry) {
  return entry >= 0 && entry < table.num_blocks;
}

struct IndexTensors {
  Index cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, num_seqs;
  BlockTable block_table;
  int64_t capacity;  // the most keys that a row of the table, or the dense tensor, can hold
  int32_t num_sequences, num_tokens;
};

// The arguments must have passed CheckAttentionArguments.
IndexTensors IndexTensorsOf(const flashxla_attention_args& args);

struct Sequence {
  int32_t first_query;  // row of q
  int32_t num_queries;
  int32_t length;     // len_k: the last query is at position length - 1 among the keys
  int32_t first_key;  // queries see keys of [first_key, num_keys) only
  int32_t num_keys;
  int32_t key_row;  // dense: row of k where the sequence starts
};

FLASHXLA_HOST_DEVICE int32_t NumSequences(const IndexTensors& index) {
  if (index.num_seqs.data == nullptr) return index.num_sequences;
  const int32_t num_seqs = At(index.num_seqs, 0);
  return num_seqs < 0 ? 0 : num_seqs < index.num_sequences ? num_seqs : index.num_sequences;
}

// Whether [begin, end) are rows of q. A sequence with such queries is sound if it also does not
// start before the end of the previous sound one.
FLASHXLA_HOST_DEVICE bool AreQueries(const IndexTensors& index, int32_t begin, int32_t end) {
  return begin >= 0 && begin <= end && end <= index.num_tokens;
}

// Fills in the keys of sequence i. False if its entries are unsound: the sequence is skipped.
FLASHXLA_HOST_DEVICE bool ReadKeys(const IndexTensors& index, int64_t i, Sequence* s) {
  int64_t capacity = index.capacity;
  s->key_row = 0;
  if (index.block_table.data == nullptr) {
    const int32_t begin = At(index.cu_seqlens_k, i), end = At(index.cu_seqlens_k, i + 1);
    if (begin < 0 || end < begin || end > capacity) return false;
    s->key_row = begin;
    // With seqused_k, which gives the length, cu_seqlens_k only gives the start.
    capacity = index.seqused_k.data ? capacity - begin : end - begin;
  }
  s->length = index.seqused_k.data ? At(index.seqused_k, i) : static_cast<int32_t>(capacity);
  if (s->length < 0) return false;
  s->num_keys = s->length < capacity ? s->length : static_cast<int32_t>(capacity);
  s->first_key = 0;
  if (index.leftpad_k.data != nullptr) {
    const int32_t leftpad = At(index.leftpad_k, i);
    s->first_key = leftpad < 0 ? 0 : leftpad < s->num_keys ? leftpad : s->num_keys;
  }
  return true;
}

// The slot of a paged cache to which the key of query i is written; -1 if it has none.
FLASHXLA_HOST_DEVICE int64_t SlotOfQuery(const IndexTensors& index, int64_t sequence,
                                         const Sequence& s, int64_t i) {
  const BlockTable& table = index.block_table;
  const int64_t position = i + s.length - s.num_queries;
  if (position < 0 || position >= s.num_keys) return -1;
  const int64_t page = position / table.block_size;
  const int32_t block = Entry(table, sequence, page);
  if (!IsSound(table, block)) return -1;
  return int64_t{block} * table.block_size + (position - page * table.block_size);
}

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_COMMON_SEQUENCES_H_
