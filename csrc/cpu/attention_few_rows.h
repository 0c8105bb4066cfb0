// Attention for a few rows of each KV head (decode). Memory bandwidth is the limit: keys and values
// are read once, in place, and converted to float in registers.
#ifndef FLASHXLA_CSRC_CPU_ATTENTION_FEW_ROWS_H_
#define FLASHXLA_CSRC_CPU_ATTENTION_FEW_ROWS_H_

#include "common/attention_arguments.h"
#include "common/math_constants.h"
#include "cpu/attention_engine.h"
#include "cpu/simd.h"

namespace flashxla {
namespace {

constexpr int kMaxFewRows = 8;       // per KV head
constexpr int kMaxFewRowsTask = 32;  // per task, all its KV heads
constexpr int kChunkKeys = 64;       // at most, between two updates of the softmax state
constexpr int kMinChunkKeys = 16;
constexpr int64_t kChunkBytes = 128 << 10;                // all heads of a chunk's keys
static_assert(kChunkKeys + kWidth <= KeyList::kMaxKeys);  // whole vectors are loaded

// Cuts a row of head_size elements into vectors. The last one ends with the row and may overlap the
// one before. Queries have zeros in the overlap, and the overlap of keys is cleared.
struct RowVectors {
  int64_t head_size;
  int64_t last_offset;  // of the last vector in the row
  int count;
  int32_t overlap;  // lanes of the last vector that the one before covers

  explicit RowVectors(int64_t size)
      : head_size(size),
        last_offset(size - kWidth),
        count(static_cast<int>((size + kWidth - 1) / kWidth)),
        overlap(static_cast<int32_t>(count * kWidth - size)) {}

  // The lane of element d, counted over the row's vectors.
  int64_t LaneOf(int64_t d) const { return d >= int64_t{count - 1} * kWidth ? d + overlap : d; }

  int64_t OffsetOf(int vector) const {
    return vector == count - 1 ? last_offset : int64_t{vector} * kWidth;
  }
};

struct FewRowsScratch {
  float queries[kMaxFewRowsTask][kMaxHeadSize / kWidth][kWidth];
  float out[kMaxFewRowsTask][kMaxValueHeadSize / kWidth][kWidth];
  float weights[kMaxFewRowsTask][kChunkKeys + kWidth];  // scores, then 2^(score - row_max)
  float slope[kMaxFewRowsTask];
  RowState state[kMaxFewRowsTask];
  float row[kMaxHeadSize];
  float rescale[kMaxFewRowsTask];
};

// Returns a vector whose lane i is the sum of the lanes of x[i]. Each step halves the number of
// vectors: with kCount left, every sum is spread over kCount lanes.
template <int kCount>
inline Float SumEach(Float* x) {
  if constexpr (kCount == 1) {
    return x[0];
  } else {
    for (int i = 0; i < kCount / 2; ++i) {
      const Float a = x[i], b = x[i + kCount / 2];
      x[i] = HalfBlocks<kCount, 0>(a, b) + HalfBlocks<kCount, kCount / 2>(a, b);
    }
    return SumEach<kCount / 2>(x);
  }
}

template <typename Format>
class FewRowsAttention {
 public:
  using Bits = typename Format::Bits;

  FewRowsAttention(const AttentionProblem& problem, const AttentionTask& task, void* memory)
      : problem_(problem),
        task_(task),
        scratch_(*static_cast<FewRowsScratch*>(memory)),
        keys_(problem.head_size),
        values_(problem.v_head_size) {
    row_bytes_ = keys_.head_size * static_cast<int64_t>(sizeof(Bits));
    num_rows_ = static_cast<int>(task.row_end - task.row_begin);
    softcap_ = static_cast<float>(problem.args->softcap);
    alibi_ = problem.args->alibi_slopes.data != nullptr;
    // All heads process a chunk in turn. The heads of a token are mostly neighbours in memory, so
    // the hardware prefetches the next head's bytes with this head's. A small chunk keeps them in
    // the cache until that head's turn.
    const int64_t token_bytes = problem.k.stride_token * static_cast<int64_t>(sizeof(Bits));
    chunk_keys_ = kChunkKeys;
    while (chunk_keys_ > kMinChunkKeys && chunk_keys_ * token_bytes > kChunkBytes) chunk_keys_ /= 2;
  }

  void Run() {
    for (int64_t head = task_.kv_head_begin; head < task_.kv_head_end; ++head) LoadQueries(head);
    KeyList lists[2];
    KeyList *now = &lists[0], *next = &lists[1];
    position_ = task_.key_begin;
    head_ = task_.kv_head_end;
    for (bool more = Advance(*next, now); more;) {
      const int64_t head = head_;
      more = Advance(*now, next);
      upcoming_ = more ? next : now;
      AttendChunk(*now, head);
      KeyList* done = now;
      now = next, next = done;
    }
    for (int64_t head = task_.kv_head_begin; head < task_.kv_head_end; ++head) StoreRows(head);
  }

 private:
  // Moves to the next KV head of the same keys, or to the next keys. `list` is the current chunk.
  bool Advance(const KeyList& list, KeyList* next) {
    if (++head_ < task_.kv_head_end) {
      const int64_t key_step = problem_.k.stride_head * static_cast<int64_t>(sizeof(Bits));
      const int64_t value_step = problem_.v.stride_head * static_cast<int64_t>(sizeof(Bits));
      for (int64_t i = 0; i < list.size; ++i) {
        next->key[i] = list.key[i] + key_step;
        next->value[i] = list.value[i] + value_step;
        next->position[i] = list.position[i];
      }
      next->size = list.size;
      return true;
    }
    head_ = task_.kv_head_begin;
    while (position_ < task_.key_end) {
      problem_.ListKeys(*task_.sequence, head_, &position_, task_.key_end, chunk_keys_, next);
      if (next->size > 0) return true;
    }
    return false;
  }

  // Asks for a part of a row that is needed soon. Only the L2 cache can wait for enough of them at
  // a time to keep memory busy.
  static void Prefetch(const char* row, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
  }

  // The first row of a KV head in the scratch memory.
  int FirstRow(int64_t head) const {
    return static_cast<int>(head - task_.kv_head_begin) * num_rows_;
  }

  void LoadQueries(int64_t kv_head) {
    const float scale = problem_.ScoreScale(*task_.sequence, kv_head);
    // Scores are in base 2, or in units of the softcap.
    const float factor = softcap_ > 0.0f ? scale / softcap_ : scale * kLog2e;
    for (int i = 0; i < num_rows_; ++i) {
      const int64_t row = task_.row_begin + i;
      const int slot = FirstRow(kv_head) + i;
      const int64_t head = kv_head * problem_.group_size + row % problem_.group_size;
      LoadQuery(problem_, task_, kv_head, row, scratch_.row);
      float* q = scratch_.queries[slot][0];
      for (int64_t j = 0; j < keys_.count * kWidth; ++j) q[j] = 0.0f;
      for (int64_t d = 0; d < keys_.head_size; ++d) q[keys_.LaneOf(d)] = scratch_.row[d] * factor;
      __builtin_memset(scratch_.out[slot], 0, values_.count * sizeof(scratch_.out[slot][0]));
      scratch_.slope[slot] = alibi_ ? problem_.AlibiSlope(*task_.sequence, head) * kLog2e : 0.0f;
      scratch_.state[slot] = {-kInfinity, 0.0f};
    }
  }

  void StoreRows(int64_t kv_head) {
    for (int i = 0; i < num_rows_; ++i) {
      const int slot = FirstRow(kv_head) + i;
      const float* out = scratch_.out[slot][0];
      for (int64_t d = 0; d < values_.head_size; ++d) scratch_.row[d] = out[values_.LaneOf(d)];
      FinishRow(problem_, task_, kv_head, task_.row_begin + i, scratch_.row, scratch_.state[slot]);
    }
  }

  // If all rows see the whole chunk, they process it together. Otherwise it goes token by token,
  // since all rows of a token see the same keys: no row computes with a key that it does not see.
  void AttendChunk(const KeyList& list, int64_t kv_head) {
    const int first_row = FirstRow(kv_head);
    const ListedSequence& sequence = *task_.sequence;
    const int64_t group = problem_.group_size;
    const KeyRange first = problem_.Visible(sequence, task_.row_begin / group);
    const KeyRange last = problem_.Visible(sequence, (task_.row_end - 1) / group);
    if (last.begin <= list.position[0] && first.end > list.position[list.size - 1]) {
      AttendRows(list, first_row, first_row + num_rows_, 0, list.size);
      return;
    }
    for (int64_t row = task_.row_begin; row < task_.row_end;) {
      const int64_t i = row / group, row_end = Min((i + 1) * group, task_.row_end);
      const KeyRange range = problem_.Visible(sequence, i);
      int64_t begin = 0, end = list.size;
      while (begin < end && list.position[begin] < range.begin) ++begin;
      while (begin < end && list.position[end - 1] >= range.end) --end;
      if (begin < end) {
        AttendRows(list, first_row + static_cast<int>(row - task_.row_begin),
                   first_row + static_cast<int>(row_end - task_.row_begin), begin, end);
      }
      row = row_end;
    }
  }

  void AttendRows(const KeyList& list, int row_begin, int row_end, int64_t begin, int64_t end) {
    ForRowGroups(row_begin, row_end, [&](auto group, int row) {
      constexpr int kRows = decltype(group)::kRows;
      for (int64_t key = begin; key < end; key += kWidth / kRows) {
        for (int i = 0; row == row_begin && i < kWidth / kRows; ++i) {
          Prefetch(upcoming_->key[Min(key + i, upcoming_->size - 1)], row_bytes_);
        }
        Score<kRows>(list, row, key, end);
      }
    });
    for (int row = row_begin; row < row_end; ++row) UpdateSoftmax(list, row, begin, end);
    ForRowGroups(row_begin, row_end, [&](auto group, int row) {
      constexpr int kRows = decltype(group)::kRows;
      int vector = 0;
      constexpr int kMost = kRows == 4 ? 4 : 8;
      for (; vector + kMost <= values_.count; vector += kMost) {
        AddValues<kRows, kMost>(list, row, vector, begin, end);
      }
      if (kRows < 4 && vector + 4 <= values_.count) {
        AddValues<kRows, 4>(list, row, vector, begin, end);
        vector += 4;
      }
      for (; vector + 2 <= values_.count; vector += 2) {
        AddValues<kRows, 2>(list, row, vector, begin, end);
      }
      if (vector < values_.count) AddValues<kRows, 1>(list, row, vector, begin, end);
    });
  }

  template <int kCount>
  struct RowGroup {
    static constexpr int kRows = kCount;
  };

  // Calls f(RowGroup, first row) for groups of 4, 2 or 1 rows.
  template <typename Function>
  static void ForRowGroups(int row, int end, Function&& f) {
    for (; row + 4 <= end; row += 4) f(RowGroup<4>(), row);
    if (row + 2 <= end) {
      f(RowGroup<2>(), row);
      row += 2;
    }
    if (row < end) f(RowGroup<1>(), row);
  }

  // The scores of kRows rows and the keys from `key` on, kWidth scores in all.
  template <int kRows>
  void Score(const KeyList& list, int row, int64_t key, int64_t end) {
    constexpr int kKeys = kWidth / kRows;
    const Bits* keys[kKeys];
    for (int i = 0; i < kKeys; ++i) {  // past the end: the last key again; its score is not used
      keys[i] = reinterpret_cast<const Bits*>(list.key[Min(key + i, end - 1)]);
    }
    // One key after the other, as they lie in memory.
    Float sums[kWidth] = {};  // [row][key]
    const int whole = keys_.overlap == 0 ? keys_.count : keys_.count - 1;
    const Int lanes = Lanes();
#pragma GCC unroll 16
    for (int i = 0; i < kKeys; ++i) {
      for (int vector = 0; vector < whole; ++vector) {
        const Float k = LoadAs<Format>(keys[i] + vector * kWidth);
        for (int r = 0; r < kRows; ++r) {
          sums[r * kKeys + i] += Load(scratch_.queries[row + r][vector]) * k;
        }
      }
      if (keys_.overlap != 0) {
        const Float tail = LoadAs<Format>(keys[i] + keys_.last_offset);
        const Float k = lanes >= keys_.overlap ? tail : Float{};
        for (int r = 0; r < kRows; ++r) {
          sums[r * kKeys + i] += Load(scratch_.queries[row + r][whole]) * k;
        }
      }
    }
    float scores[kWidth];
    Store(scores, SumEach<kWidth>(sums));
    for (int r = 0; r < kRows; ++r) {
      __builtin_memcpy(scratch_.weights[row + r] + key, scores + r * kKeys, kKeys * sizeof(float));
    }
  }

  // Online softmax: turns the scores of a row into weights and updates its state.
  void UpdateSoftmax(const KeyList& list, int row, int64_t begin, int64_t end) {
    float* weights = scratch_.weights[row];
    if (softcap_ > 0.0f || alibi_) AdjustScores(list, row, begin, end);
    for (int i = 0; i < kWidth; ++i) weights[end + i] = -kInfinity;
    Float row_maxes = Splat(scratch_.state[row].row_max);
    for (int64_t i = begin; i < end; i += kWidth) {
      const Float score = Load(weights + i);
      row_maxes = score > row_maxes ? score : row_maxes;
    }
    const float old_max = scratch_.state[row].row_max;
    float row_max = row_maxes[0];
    for (int i = 1; i < kWidth; ++i) row_max = Max(row_max, row_maxes[i]);
    const float base = row_max == -kInfinity ? 0.0f : row_max;
    Float sums = {};
    for (int64_t i = begin; i < end; i += kWidth) {
      const Float weight = Exp2(Load(weights + i) - base);
      Store(weights + i, weight);
      sums += weight;
    }
    float chunk_sum = 0.0f;
    for (int i = 0; i < kWidth; ++i) chunk_sum += sums[i];
    const float rescale = Exp2(Splat(old_max - base))[0];
    scratch_.rescale[row] = rescale;
    scratch_.state[row] = {row_max, scratch_.state[row].row_sum * rescale + chunk_sum};
  }

  void AdjustScores(const KeyList& list, int row, int64_t begin, int64_t end) {
    const ListedSequence& sequence = *task_.sequence;
    const int64_t token = (task_.row_begin + row % num_rows_) / problem_.group_size;
    const Int diagonal =
        SplatInt(static_cast<int32_t>(token + sequence.length - sequence.num_queries));
    for (int64_t i = begin; i < end; i += kWidth) {
      Float score = Load(scratch_.weights[row] + i);
      if (softcap_ > 0.0f) score = Tanh(score) * (softcap_ * kLog2e);
      if (alibi_) {
        // Unsigned: lanes past the end of the list may hold anything, and must not overflow.
        const Int distance = (Int)((Uint)diagonal - (Uint)Load(list.position + i));
        score -= scratch_.slope[row] * Abs(__builtin_convertvector(distance, Float));
      }
      Store(scratch_.weights[row] + i, score);
    }
  }

  // Adds the weighted values of kRows rows to kVectors vectors of their results.
  template <int kRows, int kVectors>
  void AddValues(const KeyList& list, int row, int vector, int64_t begin, int64_t end) {
    Float out[kRows][kVectors];
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        out[r][v] = Load(scratch_.out[row + r][vector + v]) * scratch_.rescale[row + r];
      }
    }
    const int64_t last = values_.OffsetOf(vector + kVectors - 1);
    for (int64_t key = begin; key < end; ++key) {
      const Bits* p = reinterpret_cast<const Bits*>(list.value[key]);
      Prefetch(upcoming_->value[Min(key, upcoming_->size - 1)] + vector * kWidth * sizeof(Bits),
               kVectors * kWidth * sizeof(Bits));
      Float value[kVectors];
      for (int v = 0; v < kVectors - 1; ++v) value[v] = LoadAs<Format>(p + (vector + v) * kWidth);
      value[kVectors - 1] = LoadAs<Format>(p + last);
      for (int r = 0; r < kRows; ++r) {
        const Float weight = Splat(scratch_.weights[row + r][key]);
        for (int v = 0; v < kVectors; ++v) out[r][v] += weight * value[v];
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) Store(scratch_.out[row + r][vector + v], out[r][v]);
    }
  }

  const AttentionProblem& problem_;
  const AttentionTask& task_;
  FewRowsScratch& scratch_;
  const RowVectors keys_, values_;
  int64_t chunk_keys_, row_bytes_;
  int64_t position_, head_;  // of the chunk after the current one
  const KeyList* upcoming_;  // its keys
  int num_rows_;
  float softcap_;
  bool alibi_;
};

const char* WhyNotFewRows(const AttentionProblem& problem) {
  if (problem.k.stride_dim != 1 || problem.v.stride_dim != 1)
    return "few_rows needs a contiguous head dimension";
  if (problem.head_size < kWidth || problem.v_head_size < kWidth) {
    return "few_rows needs a head size of at least one vector register";
  }
  return "";
}

int64_t FewRowsScratchBytes(const AttentionProblem&) { return sizeof(FewRowsScratch); }

void AttendFewRows(const AttentionProblem& problem, const AttentionTask& task, void* scratch) {
  WithFormat(problem.args->kv_dtype, [&](auto format) {
    FewRowsAttention<decltype(format)>(problem, task, scratch).Run();
  });
}

}  // namespace
}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CPU_ATTENTION_FEW_ROWS_H_
