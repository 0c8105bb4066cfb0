#include "common/index_checks.h"

#include <algorithm>
#include <cinttypes>

#include "common/error.h"

namespace flashxla {
namespace {

// Reports the first bad entry: one that the rules of sequences.h skip, or that exceeds the caller's
// max_seqlen_q or max_seqlen_k.
class Checker {
 public:
  Checker(const flashxla_attention_args& args, const IndexTensors& index)
      : args_(args), index_(index) {}

  flashxla_status status() const { return status_; }

  void NumSeqs() {
    if (args_.num_seqs.data == nullptr) return;
    const int64_t num_seqs = At(index_.num_seqs, 0), size = index_.num_sequences;
    if (num_seqs < 0 || num_seqs > size) {
      Bad("num_seqs = %" PRId64 ": outside [0, %" PRId64 "]", num_seqs, size);
    }
  }

  void Queries(int64_t s, int64_t begin, int64_t end, int64_t previous_end) {
    const int64_t num_tokens = index_.num_tokens;
    if (begin < previous_end || begin > num_tokens) {
      Bad("cu_seqlens_q[%" PRId64 "] = %" PRId64 ": outside [%" PRId64 ", %" PRId64 "]", s, begin,
          previous_end, num_tokens);
    } else if (end < begin || end > num_tokens) {
      Bad("cu_seqlens_q[%" PRId64 "] = %" PRId64 ": outside [%" PRId64 ", %" PRId64 "]", s + 1, end,
          begin, num_tokens);
    } else if (end - begin > args_.max_seqlen_q) {
      Bad("cu_seqlens_q[%" PRId64 "] = %" PRId64 ": %" PRId64
          " queries, more than max_seqlen_q = %" PRId64,
          s + 1, end, end - begin, args_.max_seqlen_q);
    }
  }

  void Keys(int64_t s) {
    int64_t begin = 0, capacity = index_.capacity;
    const bool used = args_.seqused_k.data != nullptr;
    if (args_.block_table.data == nullptr) {
      const int64_t end = At(index_.cu_seqlens_k, s + 1);
      begin = At(index_.cu_seqlens_k, s);
      if (begin < 0 || begin > capacity) {
        return Bad("cu_seqlens_k[%" PRId64 "] = %" PRId64 ": outside [0, %" PRId64 "]", s, begin,
                   capacity);
      }
      if (end < begin || end > capacity) {
        return Bad("cu_seqlens_k[%" PRId64 "] = %" PRId64 ": outside [%" PRId64 ", %" PRId64 "]",
                   s + 1, end, begin, capacity);
      }
      capacity = used ? capacity - begin : end - begin;
    }
    const int64_t length = used ? At(index_.seqused_k, s) : capacity;
    const int64_t bound = std::min(capacity, args_.max_seqlen_k);
    if (used && (length < 0 || length > bound)) {
      Bad("seqused_k[%" PRId64 "] = %" PRId64 ": outside [0, %" PRId64 "]", s, length, bound);
    } else if (length > bound) {
      Bad("cu_seqlens_k[%" PRId64 "] = %" PRId64 ": %" PRId64
          " keys, more than max_seqlen_k = %" PRId64,
          s + 1, begin + length, length, args_.max_seqlen_k);
    }
    if (args_.leftpad_k.data == nullptr) return;
    const int64_t leftpad = At(index_.leftpad_k, s);
    if (leftpad < 0) Bad("leftpad_k[%" PRId64 "] = %" PRId64 ": negative", s, leftpad);
  }

  void Pages(const ListedSequence& sequence) {
    const BlockTable& table = index_.block_table;
    if (table.data == nullptr) return;
    for (int64_t page = 0; page * table.block_size < sequence.num_keys; ++page) {
      const int64_t entry = Entry(table, sequence.index, page);
      if (IsSound(table, static_cast<int32_t>(entry))) continue;
      Bad("block_table[%" PRId64 ", %" PRId64 "] = %" PRId64 ": outside [0, %" PRId64 ")",
          sequence.index, page, entry, int64_t{table.num_blocks});
    }
  }

 private:
  template <typename... Values>
  void Bad(const char* format, Values... values) {
    if (status_ == FLASHXLA_OK) status_ = SetError(FLASHXLA_INVALID_ARGUMENT, format, values...);
  }

  const flashxla_attention_args& args_;
  const IndexTensors& index_;
  flashxla_status status_ = FLASHXLA_OK;
};

}  // namespace

flashxla_status ReadSequences(const flashxla_attention_args& args, bool check,
                              std::vector<ListedSequence>* sequences) {
  const IndexTensors index = IndexTensorsOf(args);
  Checker checker(args, index);
  if (check) checker.NumSeqs();
  int32_t query_end = 0;  // of the sound sequences so far
  const int32_t num_sequences = NumSequences(index);
  for (int32_t s = 0; s < num_sequences; ++s) {
    const int32_t begin = At(index.cu_seqlens_q, s), end = At(index.cu_seqlens_q, s + 1);
    if (check) checker.Queries(s, begin, end, query_end);
    if (begin < query_end || !AreQueries(index, begin, end)) continue;
    query_end = end;
    ListedSequence sequence = {};
    sequence.index = s, sequence.first_query = begin, sequence.num_queries = end - begin;
    if (check) checker.Keys(s);
    if (!ReadKeys(index, s, &sequence)) continue;
    if (check) checker.Pages(sequence);
    if (sequence.num_queries > 0) sequences->push_back(sequence);
  }
  return checker.status();
}

}  // namespace flashxla
