// The sequences that have keys among some rows of k.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_KEY_SEQUENCES_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_KEY_SEQUENCES_CUH_

#include "cuda/attention/warp.cuh"
#include "cuda/attention_backward/problem.cuh"

namespace flashxla::attention_backward {

// Queries [begin, end) of a sequence.
struct QueryRange {
  int begin, end;
};

// Goes over the sequences in which some query may see a key among rows [first_row, first_row +
// num_rows) of k. The whole warp must call Next.
class KeySequences {
 public:
  __device__ KeySequences(int first_row, int num_rows)
      : first_row_(first_row), num_rows_(num_rows) {}

  // Steps to the next sequence. False: there is none.
  __device__ bool Next(const Problem& p) {
    while (left_ == 0) {
      if (next_ >= p.plan.num_sequences) return false;
      base_ = next_;
      next_ += 32;
      const int i = base_ + (threadIdx.x & 31);
      bool found = false;
      if (i < p.plan.num_sequences) {
        const PlannedSequence s = p.plan.sequences[i];
        const QueryRange queries = Queries(p, s);
        found = s.role != attention::kIdle && queries.begin < queries.end;
      }
      left_ = __ballot_sync(attention::kAllLanes, found);
    }
    index_ = base_ + __ffs(left_) - 1;
    left_ &= left_ - 1;
    return true;
  }

  // The queries of a sequence that may see one of the rows.
  __device__ QueryRange Queries(const Problem& p, const Sequence& s) const {
    const int64_t first = int64_t{first_row_} - s.key_row;
    const int64_t begin_key = max(first, int64_t{s.first_key});
    const int64_t end_key = min(first + num_rows_, int64_t{s.num_keys});
    if (begin_key >= end_key) return {0, 0};
    const int64_t offset = int64_t{s.length} - s.num_queries;  // from a query to its own position
    int64_t begin = 0, end = s.num_queries;
    if (p.window.right >= 0) begin = max(begin, begin_key - p.window.right - offset);
    if (p.window.left >= 0) end = min(end, end_key + p.window.left - offset);
    if (begin >= end) return {0, 0};
    return {static_cast<int>(begin), static_cast<int>(end)};
  }

  __device__ int index() const { return index_; }
  __device__ int first_row() const { return first_row_; }

 private:
  int first_row_, num_rows_;
  int base_ = 0, next_ = 0, index_ = 0;
  unsigned left_ = 0;  // of the sequences from base_ on
};

}  // namespace flashxla::attention_backward

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_KEY_SEQUENCES_CUH_
