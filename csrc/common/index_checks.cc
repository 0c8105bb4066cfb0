#include "common/index_checks.h"

#include <algorithm>
#include <cinttypes>

#include "common/error.h"

namespace flashxla {
namespace {

int64_t ReadI32(const flashxla_tensor& t, int64_t i) {
  return static_cast<const int32_t*>(t.data)[i * t.stride[0]];
}

// Reads the index tensors, one sequence at a time. Every member returns whether the entry is sound;
// with `check`, the first one that is not also sets `status`.
struct IndexReader {
  const flashxla_attention_args& args;
  const bool check;
  const bool paged;
  const int64_t num_tokens;
  const int64_t num_blocks;
  const int64_t block_size;
  flashxla_status status = FLASHXLA_OK;

  template <typename... Values>
  bool Bad(const char* format, Values... values) {
    if (check && status == FLASHXLA_OK) {
      status = SetError(FLASHXLA_INVALID_ARGUMENT, format, values...);
    }
    return false;
  }

  int64_t NumSequences() {
    const int64_t size = args.cu_seqlens_q.shape[0] - 1;
    if (args.num_seqs.data == nullptr) return size;
    const int64_t num_seqs = ReadI32(args.num_seqs, 0);
    if (num_seqs < 0 || num_seqs > size) {
      Bad("num_seqs = %" PRId64 ": outside [0, %" PRId64 "]", num_seqs, size);
    }
    return std::clamp<int64_t>(num_seqs, 0, size);
  }

  bool Queries(int64_t s, int64_t previous_end, Sequence* sequence) {
    const int64_t begin = ReadI32(args.cu_seqlens_q, s);
    const int64_t end = ReadI32(args.cu_seqlens_q, s + 1);
    if (begin < previous_end || begin > num_tokens) {
      return Bad("cu_seqlens_q[%" PRId64 "] = %" PRId64 ": outside [%" PRId64 ", %" PRId64 "]", s,
                 begin, previous_end, num_tokens);
    }
    if (end < begin || end > num_tokens) {
      return Bad("cu_seqlens_q[%" PRId64 "] = %" PRId64 ": outside [%" PRId64 ", %" PRId64 "]",
                 s + 1, end, begin, num_tokens);
    }
    if (end - begin > args.max_seqlen_q) {
      Bad("cu_seqlens_q[%" PRId64 "] = %" PRId64 ": %" PRId64
          " queries, more than max_seqlen_q = %" PRId64,
          s + 1, end, end - begin, args.max_seqlen_q);
    }
    sequence->index = s;
    sequence->first_query = begin;
    sequence->num_queries = end - begin;
    return true;
  }

  bool Keys(int64_t s, Sequence* sequence) {
    const bool used = args.seqused_k.data != nullptr;
    int64_t capacity;
    if (paged) {
      capacity = args.block_table.shape[1] * block_size;
      sequence->key_row = 0;
    } else {
      const int64_t begin = ReadI32(args.cu_seqlens_k, s);
      const int64_t end = ReadI32(args.cu_seqlens_k, s + 1);
      if (begin < 0 || begin > block_size) {
        return Bad("cu_seqlens_k[%" PRId64 "] = %" PRId64 ": outside [0, %" PRId64 "]", s, begin,
                   block_size);
      }
      if (end < begin || end > block_size) {
        return Bad("cu_seqlens_k[%" PRId64 "] = %" PRId64 ": outside [%" PRId64 ", %" PRId64 "]",
                   s + 1, end, begin, block_size);
      }
      // seqused_k gives the length, cu_seqlens_k only the start then.
      capacity = used ? block_size - begin : end - begin;
      sequence->key_row = begin;
    }
    const int64_t length = used ? ReadI32(args.seqused_k, s) : capacity;
    const int64_t bound = std::min(capacity, args.max_seqlen_k);
    if (length < 0 || length > bound) {
      if (used) {
        Bad("seqused_k[%" PRId64 "] = %" PRId64 ": outside [0, %" PRId64 "]", s, length, bound);
      } else {
        Bad("cu_seqlens_k[%" PRId64 "] = %" PRId64 ": %" PRId64
            " keys, more than max_seqlen_k = %" PRId64,
            s + 1, sequence->key_row + length, length, args.max_seqlen_k);
      }
      if (length < 0) return false;
    }
    sequence->length = length;
    sequence->num_keys = std::min(length, capacity);
    sequence->first_key = 0;
    if (args.leftpad_k.data != nullptr) {
      const int64_t leftpad = ReadI32(args.leftpad_k, s);
      if (leftpad < 0) Bad("leftpad_k[%" PRId64 "] = %" PRId64 ": negative", s, leftpad);
      sequence->first_key = std::clamp<int64_t>(leftpad, 0, sequence->num_keys);
    }
    if (check && paged) CheckTable(*sequence);
    return true;
  }

  void CheckTable(const Sequence& sequence) {
    for (int64_t page = 0; page * block_size < sequence.num_keys; ++page) {
      const int64_t entry = TableEntry(args.block_table, sequence.index, page);
      if (entry < 0 || entry >= num_blocks) {
        Bad("block_table[%" PRId64 ", %" PRId64 "] = %" PRId64 ": outside [0, %" PRId64 ")",
            sequence.index, page, entry, num_blocks);
      }
    }
  }
};

}  // namespace

int64_t TableEntry(const flashxla_tensor& table, int64_t sequence, int64_t page) {
  return static_cast<const int32_t*>(
      table.data)[sequence * table.stride[0] + page * table.stride[1]];
}

flashxla_status ReadSequences(const flashxla_attention_args& args, int64_t num_blocks,
                              int64_t block_size, bool check, std::vector<Sequence>* sequences) {
  const bool paged = args.block_table.data != nullptr;
  IndexReader reader{args, check, paged, args.q.shape[0], num_blocks, block_size};
  int64_t query_end = 0;  // of the sequences so far
  const int64_t num_sequences = reader.NumSequences();
  for (int64_t s = 0; s < num_sequences; ++s) {
    Sequence sequence;
    if (!reader.Queries(s, query_end, &sequence)) continue;
    query_end = sequence.first_query + sequence.num_queries;
    if (!reader.Keys(s, &sequence) || sequence.num_queries == 0) continue;
    sequences->push_back(sequence);
  }
  return reader.status;
}

}  // namespace flashxla
