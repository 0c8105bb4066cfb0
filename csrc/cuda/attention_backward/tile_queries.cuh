// The queries that see keys among some rows of k, as the tile engine's stages have them.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_TILE_QUERIES_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_TILE_QUERIES_CUH_

#include "cuda/attention_backward/key_sequences.cuh"
#include "cuda/attention_backward/tile_scores.cuh"

namespace flashxla::attention_backward {

// What a stage holds besides its rows of Q and grad_out. Keys are counted from the first row of k
// of the thread block.
template <int kQueries>
struct alignas(16) QueryStage {
  float lse2[kQueries], delta[kQueries];
  KeyRange seen[kQueries];  // none past the last query
  KeyRange some, all;       // what some queries see, and what all do
  int64_t distance;         // of the first query and key: see Problem::Score
  float slope;
  bool exists;  // false: there are no more queries
};

// Goes over the queries that see keys among rows [first_row, first_row + num_rows) of k: those of
// all sequences with keys there, and of all heads that share a KV head. The whole warp must call
// its functions.
template <int kQueries>
class QueryCursor {
 public:
  __device__ QueryCursor(const Problem& p, int first_row, int num_rows, int kv_head)
      : sequences_(first_row, num_rows),
        first_head_(kv_head * p.group_size),
        head_(first_head_ + p.group_size) {}

  // Steps to the next kQueries queries of one sequence and head. False: there are none.
  __device__ bool Next(const Problem& p) {
    query_ += kQueries;
    if (query_ < queries_.end) return true;
    if (++head_ >= first_head_ + p.group_size) {
      if (!sequences_.Next(p)) return false;
      const PlannedSequence s = p.plan.sequences[sequences_.index()];
      first_token_ = s.first_query;
      queries_ = sequences_.Queries(p, s);
      head_ = first_head_;
    }
    query_ = queries_.begin;
    return true;
  }

  // Fills in a stage of the thread block, but for Q and grad_out. lse2 and delta may arrive later,
  // with the copies that this starts.
  __device__ void Describe(const Problem& p, bool exists, QueryStage<kQueries>& stage) const {
    if (threadIdx.x == 0) stage.exists = exists;
    const int i = threadIdx.x;
    if (!exists || i >= kQueries) return;
    // Read again rather than kept: registers are scarce.
    const PlannedSequence s = p.plan.sequences[sequences_.index()];
    const int shift = s.key_row - sequences_.first_row();
    auto visible = [&](int first, int last) -> KeyRange {
      const KeyRange keys = p.Visible(s, first, last);
      return {keys.begin + shift, keys.end + shift};
    };
    const bool valid = i < count();
    const int64_t place = valid ? p.RowPlace(sequences_.index(), query_ + i, head_) : 0;
    attention::CopyAsync<4>(attention::SharedAddress(&stage.lse2[i]), p.lse2 + place, valid);
    attention::CopyAsync<4>(attention::SharedAddress(&stage.delta[i]), p.delta + place, valid);
    stage.seen[i] = valid ? visible(query_ + i, query_ + i) : KeyRange{0, 0};
    if (i == 0) {
      const int last = query_ + min(count(), kQueries) - 1;
      stage.some = visible(query_, last);
      const bool full = count() >= kQueries;
      stage.all = full ? KeyRange{visible(last, last).begin, visible(query_, query_).end}
                       : KeyRange{kOwnRows, 0};
      stage.distance = int64_t{query_} + s.length - s.num_queries + shift;
      stage.slope = p.alibi_slopes.at(sequences_.index(), head_, 0.f);
    }
  }

  __device__ int64_t token() const { return int64_t{first_token_} + query_; }
  __device__ int head() const { return head_; }
  __device__ int count() const { return queries_.end - query_; }  // may exceed kQueries

 private:
  KeySequences sequences_;
  QueryRange queries_ = {0, 0};
  int first_head_, head_, query_ = 0;
  int first_token_ = 0;  // of the sequence
};

// A warp's 16 keys by the queries of a stage.
template <int kQueries>
class QueryColumns {
 public:
  __device__ explicit QueryColumns(const QueryStage<kQueries>& stage)
      : stage_(stage),
        key_(threadIdx.x / 32 * kSliceRows + threadIdx.x % 32 / 4),
        column_(threadIdx.x % 4 * 2) {}

  __device__ RowSums Sums(int n) const {
    const auto lse2 = *reinterpret_cast<const float2*>(&stage_.lse2[n * 8 + column_]);
    const auto delta = *reinterpret_cast<const float2*>(&stage_.delta[n * 8 + column_]);
    return {{lse2.x, lse2.y, lse2.x, lse2.y}, {delta.x, delta.y, delta.x, delta.y}};
  }
  __device__ bool Sees(int n, int i) const {
    const KeyRange seen = stage_.seen[n * 8 + column_ + i % 2];
    const int key = key_ + i / 2 * 8;
    return key >= seen.begin && key < seen.end;
  }
  __device__ int64_t Distance(int n, int i) const {
    return stage_.distance + n * 8 + column_ + i % 2 - (key_ + i / 2 * 8);
  }

 private:
  const QueryStage<kQueries>& stage_;
  int key_, column_;  // this lane's first
};

}  // namespace flashxla::attention_backward

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_TILE_QUERIES_CUH_
