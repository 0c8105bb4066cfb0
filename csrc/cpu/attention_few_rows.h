// Attention for a few rows of a KV head (decoding): bound by how fast keys and values come from
// memory, so they are read once, in place, and converted on the way to the arithmetic units.
#ifndef FLASHXLA_CSRC_CPU_ATTENTION_FEW_ROWS_H_
#define FLASHXLA_CSRC_CPU_ATTENTION_FEW_ROWS_H_

#include "cpu/attention_engine.h"
#include "cpu/simd.h"

namespace flashxla {
namespace {

constexpr int kMaxFewRows = 8;       // of a KV head
constexpr int kMaxFewRowsTask = 32;  // of a task's KV heads
constexpr int kChunkKeys = 64;       // at most, between two updates of the softmax state
constexpr int kMinChunkKeys = 16;
constexpr int64_t kChunkBytes = 64 << 10;                 // from the first to the last token
static_assert(kChunkKeys + kWidth <= KeyList::kMaxKeys);  // whole vectors are loaded
constexpr int kMaxVectors = 256 / kWidth;

// A row of head_size elements is cut into vectors; the last one ends with the row and overlaps the
// one before. The queries have zeros where it does, and the overlap of keys is cleared.
struct FewRowsScratch {
  float queries[kMaxFewRowsTask][kMaxVectors][kWidth];
  float out[kMaxFewRowsTask][kMaxVectors][kWidth];
  float weights[kMaxFewRowsTask][kChunkKeys + kWidth];  // scores, then 2^(score - top)
  float slope[kMaxFewRowsTask];
  RowState state[kMaxFewRowsTask];
  float row[256];
  float decay[kMaxFewRowsTask];
};

template <int kBlock, int kOffset>
constexpr int HalfBlockLane(int lane) {
  // Of every block of kBlock lanes, the first half comes from a, the second from b.
  return (lane / kBlock) * kBlock + kOffset + (lane % kBlock) % (kBlock / 2) +
         (lane % kBlock < kBlock / 2 ? 0 : kWidth);
}

template <int kBlock, int... kLanes>
inline Float AddHalfBlocks(Float a, Float b, std::integer_sequence<int, kLanes...>) {
  return Shuffle<HalfBlockLane<kBlock, 0>(kLanes)...>(a, b) +
         Shuffle<HalfBlockLane<kBlock, kBlock / 2>(kLanes)...>(a, b);
}

// Returns the vector of the sums of x[0] to x[kCount - 1]; kBlock lanes of each are summed so far.
template <int kCount>
inline Float SumEach(Float* x) {
  if constexpr (kCount == 1) {
    return x[0];
  } else {
    for (int i = 0; i < kCount / 2; ++i) {
      x[i] =
          AddHalfBlocks<kCount>(x[i], x[i + kCount / 2], std::make_integer_sequence<int, kWidth>());
    }
    return SumEach<kCount / 2>(x);
  }
}

template <typename Format>
class FewRowsAttention {
 public:
  using Bits = typename Format::Bits;

  FewRowsAttention(const AttentionProblem& problem, const AttentionTask& task, void* memory)
      : problem_(problem), task_(task), scratch_(*static_cast<FewRowsScratch*>(memory)) {
    head_size_ = problem.head_size;
    num_vectors_ = static_cast<int>((head_size_ + kWidth - 1) / kWidth);
    last_offset_ = head_size_ - kWidth;
    row_bytes_ = head_size_ * static_cast<int64_t>(sizeof(Bits));
    overlap_ = static_cast<int32_t>(num_vectors_ * kWidth - head_size_);
    num_rows_ = static_cast<int>(task.row_end - task.row_begin);
    softcap_ = static_cast<float>(problem.args->softcap);
    alibi_ = problem.args->alibi_slopes.data != nullptr;
    // All heads take a chunk in turn. Heads of a token are mostly neighbours in memory, so a chunk
    // is small enough for the hardware to still have at hand, for the next head, what it read on.
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
  // Moves to the next KV head of the same keys, or to the next keys. `list` is of where we are.
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

  // Fetches kBytes of a row that is needed soon.
  template <int kBytes>
  static void Prefetch(const char* row) {
    for (int i = 0; i < kBytes; i += 64) __builtin_prefetch(row + i);
  }

  // The first row of a KV head in the scratch memory.
  int FirstRow(int64_t head) const {
    return static_cast<int>(head - task_.kv_head_begin) * num_rows_;
  }

  void LoadQueries(int64_t kv_head) {
    const float scale = problem_.ScoreScale(*task_.sequence, kv_head);
    // Scores are in base 2, or in units of the softcap.
    const float factor = softcap_ > 0.0f ? scale / softcap_ : scale * kLog2E;
    for (int i = 0; i < num_rows_; ++i) {
      const int64_t row = task_.row_begin + i;
      const int slot = FirstRow(kv_head) + i;
      const int64_t head = kv_head * problem_.group_size + row % problem_.group_size;
      LoadQuery(problem_, task_, kv_head, row, scratch_.row);
      float* q = scratch_.queries[slot][0];
      for (int64_t j = 0; j < num_vectors_ * kWidth; ++j) q[j] = 0.0f;
      for (int64_t d = 0; d < head_size_; ++d) q[LaneOf(d)] = scratch_.row[d] * factor;
      __builtin_memset(scratch_.out[slot], 0, num_vectors_ * sizeof(scratch_.out[slot][0]));
      scratch_.slope[slot] = alibi_ ? problem_.AlibiSlope(*task_.sequence, head) * kLog2E : 0.0f;
      scratch_.state[slot] = {-kInfinity, 0.0f};
    }
  }

  void StoreRows(int64_t kv_head) {
    for (int i = 0; i < num_rows_; ++i) {
      const int slot = FirstRow(kv_head) + i;
      const float* out = scratch_.out[slot][0];
      for (int64_t d = 0; d < head_size_; ++d) scratch_.row[d] = out[LaneOf(d)];
      FinishRow(problem_, task_, kv_head, task_.row_begin + i, scratch_.row, scratch_.state[slot]);
    }
  }

  // Where element d of a row is in the row's vectors.
  int64_t LaneOf(int64_t d) const {
    return d >= int64_t{num_vectors_ - 1} * kWidth ? d + overlap_ : d;
  }

  // Rows of one token see the same keys. A chunk that all rows see in full is taken by all rows
  // together, another one token by token: nothing that a row does not see is ever computed.
  void AttendChunk(const KeyList& list, int64_t kv_head) {
    const int first_row = FirstRow(kv_head);
    const Sequence& sequence = *task_.sequence;
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
          const char* upcoming = upcoming_->key[Min(key + i, upcoming_->size - 1)];
          for (int64_t byte = 0; byte < row_bytes_; byte += 64) __builtin_prefetch(upcoming + byte);
        }
        Score<kRows>(list, row, key, end);
      }
    });
    for (int row = row_begin; row < row_end; ++row) Weigh(list, row, begin, end);
    ForRowGroups(row_begin, row_end, [&](auto group, int row) {
      constexpr int kRows = decltype(group)::kRows;
      int vector = 0;
      constexpr int kMost = kRows == 4 ? 4 : 8;
      for (; vector + kMost <= num_vectors_; vector += kMost) {
        AddValues<kRows, kMost>(list, row, vector, begin, end);
      }
      if (kRows < 4 && vector + 4 <= num_vectors_) {
        AddValues<kRows, 4>(list, row, vector, begin, end);
        vector += 4;
      }
      for (; vector + 2 <= num_vectors_; vector += 2) {
        AddValues<kRows, 2>(list, row, vector, begin, end);
      }
      if (vector < num_vectors_) AddValues<kRows, 1>(list, row, vector, begin, end);
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

  int64_t OffsetOf(int vector) const {
    return vector == num_vectors_ - 1 ? last_offset_ : int64_t{vector} * kWidth;
  }

  // The scores of kRows rows and the keys from `key` on, kWidth scores in all.
  template <int kRows>
  void Score(const KeyList& list, int row, int64_t key, int64_t end) {
    constexpr int kKeys = kWidth / kRows;
    const Bits* keys[kKeys];
    for (int i = 0; i < kKeys; ++i) {  // behind the end: the last key again, its score is not used
      keys[i] = reinterpret_cast<const Bits*>(list.key[Min(key + i, end - 1)]);
    }
    // One key after the other, as they lie in memory.
    Float sums[kWidth] = {};  // [row][key]
    const int whole = overlap_ == 0 ? num_vectors_ : num_vectors_ - 1;
    const Int lanes = Lanes();
#pragma GCC unroll 16
    for (int i = 0; i < kKeys; ++i) {
      for (int vector = 0; vector < whole; ++vector) {
        const Float k = LoadAs<Format>(keys[i] + vector * kWidth);
        for (int r = 0; r < kRows; ++r) {
          sums[r * kKeys + i] += Load(scratch_.queries[row + r][vector]) * k;
        }
      }
      if (overlap_ != 0) {
        const Float tail = LoadAs<Format>(keys[i] + last_offset_);
        const Float k = lanes >= overlap_ ? tail : Float{};
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

  // Turns the scores of a row into weights, and updates its state.
  void Weigh(const KeyList& list, int row, int64_t begin, int64_t end) {
    float* weights = scratch_.weights[row];
    if (softcap_ > 0.0f || alibi_) AdjustScores(list, row, begin, end);
    for (int i = 0; i < kWidth; ++i) weights[end + i] = -kInfinity;
    Float tops = Splat(scratch_.state[row].top);
    for (int64_t i = begin; i < end; i += kWidth) {
      const Float score = Load(weights + i);
      tops = score > tops ? score : tops;
    }
    const float old_top = scratch_.state[row].top;
    float top = tops[0];
    for (int i = 1; i < kWidth; ++i) top = Max(top, tops[i]);
    const float base = top == -kInfinity ? 0.0f : top;
    Float sums = {};
    for (int64_t i = begin; i < end; i += kWidth) {
      const Float weight = Exp2(Load(weights + i) - base);
      Store(weights + i, weight);
      sums += weight;
    }
    float sum = 0.0f;
    for (int i = 0; i < kWidth; ++i) sum += sums[i];
    const float decay = Exp2(Splat(old_top - base))[0];
    scratch_.decay[row] = decay;
    scratch_.state[row] = {top, scratch_.state[row].sum * decay + sum};
  }

  void AdjustScores(const KeyList& list, int row, int64_t begin, int64_t end) {
    const Sequence& sequence = *task_.sequence;
    const int64_t token = (task_.row_begin + row % num_rows_) / problem_.group_size;
    const Int diagonal =
        SplatInt(static_cast<int32_t>(token + sequence.length - sequence.num_queries));
    for (int64_t i = begin; i < end; i += kWidth) {
      Float score = Load(scratch_.weights[row] + i);
      if (softcap_ > 0.0f) score = Tanh(score) * (softcap_ * kLog2E);
      if (alibi_) {
        // Unsigned: lanes behind the list hold anything.
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
        out[r][v] = Load(scratch_.out[row + r][vector + v]) * scratch_.decay[row + r];
      }
    }
    const int64_t last = OffsetOf(vector + kVectors - 1);
    for (int64_t key = begin; key < end; ++key) {
      const Bits* p = reinterpret_cast<const Bits*>(list.value[key]);
      Prefetch<kVectors * kWidth * sizeof(Bits)>(upcoming_->value[Min(key, upcoming_->size - 1)] +
                                                 vector * kWidth * sizeof(Bits));
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
  int64_t head_size_, last_offset_, chunk_keys_, row_bytes_;
  int64_t position_, head_;  // of what comes after the current chunk
  const KeyList* upcoming_;  // and its keys
  int32_t overlap_;          // lanes of the last vector that the one before covers
  int num_vectors_, num_rows_;
  float softcap_;
  bool alibi_;
};

void AttendFewRows(const AttentionProblem& problem, const AttentionTask& task, void* scratch) {
  WithFormat(problem.args->kv_dtype, [&](auto format) {
    FewRowsAttention<decltype(format)>(problem, task, scratch).Run();
  });
}

}  // namespace
}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CPU_ATTENTION_FEW_ROWS_H_
