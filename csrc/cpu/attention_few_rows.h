// Attention for a few rows of a KV head (decoding): bound by how fast keys and values come from
// memory, so they are read once, in place, and converted on the way to the arithmetic units.
#ifndef FLASHXLA_CSRC_CPU_ATTENTION_FEW_ROWS_H_
#define FLASHXLA_CSRC_CPU_ATTENTION_FEW_ROWS_H_

#include "cpu/attention_engine.h"
#include "cpu/simd.h"

namespace flashxla {
namespace {

constexpr int kMaxFewRows = 8;
constexpr int kChunkKeys = 64;  // keys between two updates of the softmax state
static_assert(kChunkKeys + kWidth <= KeyList::kMaxKeys);  // whole vectors are loaded
constexpr int kMaxVectors = 256 / kWidth;

// A row of head_size elements is cut into vectors; the last one ends with the row and overlaps the
// one before. The queries have zeros where it does, and the overlap of keys is cleared.
struct FewRowsScratch {
  float queries[kMaxFewRows][kMaxVectors][kWidth];
  float out[kMaxFewRows][kMaxVectors][kWidth];
  float weights[kMaxFewRows][kChunkKeys + kWidth];  // scores, then 2^(score - top)
  float slope[kMaxFewRows];
  float row[256];
  RowState state[kMaxFewRows];
  float decay[kMaxFewRows];
};

template <int kBlock, int kOffset>
constexpr int HalfBlockLane(int lane) {
  // Of every block of kBlock lanes, the first half comes from a, the second from b.
  return (lane / kBlock) * kBlock + kOffset + (lane % kBlock) % (kBlock / 2) +
         (lane % kBlock < kBlock / 2 ? 0 : kWidth);
}

template <int kBlock, int... kLanes>
inline Float AddHalfBlocks(Float a, Float b, std::integer_sequence<int, kLanes...>) {
  return __builtin_shufflevector(a, b, HalfBlockLane<kBlock, 0>(kLanes)...) +
         __builtin_shufflevector(a, b, HalfBlockLane<kBlock, kBlock / 2>(kLanes)...);
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
    overlap_ = static_cast<int32_t>(num_vectors_ * kWidth - head_size_);
    num_rows_ = static_cast<int>(task.row_end - task.row_begin);
    softcap_ = static_cast<float>(problem.args->softcap);
    alibi_ = problem.args->alibi_slopes.data != nullptr;
  }

  void Run() {
    LoadQueries();
    KeyList list;
    for (int64_t next = task_.key_begin; next < task_.key_end;) {
      problem_.ListKeys(*task_.sequence, task_.kv_head, &next, task_.key_end, kChunkKeys, &list);
      if (list.size > 0) AttendChunk(list);
    }
    for (int row = 0; row < num_rows_; ++row) {
      const float* out = scratch_.out[row][0];
      for (int64_t d = 0; d < head_size_; ++d) {
        const bool in_last = d >= (num_vectors_ - 1) * kWidth;
        scratch_.row[d] = out[in_last ? d + overlap_ : d];
      }
      FinishRow(problem_, task_, task_.row_begin + row, scratch_.row, scratch_.state[row]);
    }
  }

 private:
  void LoadQueries() {
    const float scale = problem_.ScoreScale(*task_.sequence, task_.kv_head);
    // Scores are in base 2, or in units of the softcap.
    const float factor = softcap_ > 0.0f ? scale / softcap_ : scale * kLog2E;
    for (int row = 0; row < num_rows_; ++row) {
      const int64_t real_row = task_.row_begin + row;
      const int64_t head = task_.kv_head * problem_.group_size + real_row % problem_.group_size;
      LoadQuery(problem_, task_, real_row, scratch_.row);
      float* q = scratch_.queries[row][0];
      for (int64_t i = 0; i < num_vectors_ * kWidth; ++i) q[i] = 0.0f;
      for (int64_t d = 0; d < head_size_; ++d) {
        const bool in_last = d >= (num_vectors_ - 1) * kWidth;
        q[in_last ? d + overlap_ : d] = scratch_.row[d] * factor;
      }
      __builtin_memset(scratch_.out[row], 0, sizeof(scratch_.out[row]));
      scratch_.slope[row] = alibi_ ? problem_.AlibiSlope(*task_.sequence, head) * kLog2E : 0.0f;
      scratch_.state[row] = {-kInfinity, 0.0f};
    }
  }

  // Rows of one token see the same keys. A chunk that all rows see in full is taken by all rows
  // together, another one token by token: nothing that a row does not see is ever computed.
  void AttendChunk(const KeyList& list) {
    const Sequence& sequence = *task_.sequence;
    const int64_t group = problem_.group_size;
    const KeyRange first = problem_.Visible(sequence, task_.row_begin / group);
    const KeyRange last = problem_.Visible(sequence, (task_.row_end - 1) / group);
    if (last.begin <= list.position[0] && first.end > list.position[list.size - 1]) {
      AttendRows(list, 0, num_rows_, 0, list.size);
      return;
    }
    for (int64_t row = task_.row_begin; row < task_.row_end;) {
      const int64_t i = row / group, row_end = Min((i + 1) * group, task_.row_end);
      const KeyRange range = problem_.Visible(sequence, i);
      int64_t begin = 0, end = list.size;
      while (begin < end && list.position[begin] < range.begin) ++begin;
      while (begin < end && list.position[end - 1] >= range.end) --end;
      if (begin < end) {
        AttendRows(list, static_cast<int>(row - task_.row_begin),
                   static_cast<int>(row_end - task_.row_begin), begin, end);
      }
      row = row_end;
    }
  }

  void AttendRows(const KeyList& list, int row_begin, int row_end, int64_t begin, int64_t end) {
    ForRowGroups(row_begin, row_end, [&](auto rows, int row) {
      for (int64_t key = begin; key < end; key += kWidth / rows) {
        Score<rows>(list, row, key, end);
      }
    });
    for (int row = row_begin; row < row_end; ++row) Weigh(list, row, begin, end);
    ForRowGroups(row_begin, row_end, [&](auto rows, int row) {
      int vector = 0;
      constexpr int kMost = rows == 4 ? 4 : 8;
      for (; vector + kMost <= num_vectors_; vector += kMost) {
        AddValues<rows, kMost>(list, row, vector, begin, end);
      }
      if (rows < 4 && vector + 4 <= num_vectors_) {
        AddValues<rows, 4>(list, row, vector, begin, end);
        vector += 4;
      }
      for (; vector + 2 <= num_vectors_; vector += 2) {
        AddValues<rows, 2>(list, row, vector, begin, end);
      }
      if (vector < num_vectors_) AddValues<rows, 1>(list, row, vector, begin, end);
    });
  }

  // Calls f(integral constant n, row) for groups of 4, 2 or 1 rows.
  template <typename Function>
  static void ForRowGroups(int row, int end, Function&& f) {
    for (; row + 4 <= end; row += 4) f(std::integral_constant<int, 4>(), row);
    if (row + 2 <= end) {
      f(std::integral_constant<int, 2>(), row);
      row += 2;
    }
    if (row < end) f(std::integral_constant<int, 1>(), row);
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
    Float sums[kWidth] = {};  // [row][key]
    const int whole = overlap_ == 0 ? num_vectors_ : num_vectors_ - 1;
    for (int vector = 0; vector < whole; ++vector) {
      Float q[kRows];
      for (int r = 0; r < kRows; ++r) q[r] = Load(scratch_.queries[row + r][vector]);
      for (int i = 0; i < kKeys; ++i) {
        const Float k = LoadAs<Format>(keys[i] + vector * kWidth);
        for (int r = 0; r < kRows; ++r) sums[r * kKeys + i] += q[r] * k;
      }
    }
    if (overlap_ != 0) {
      const Int lanes = Lanes();
      for (int i = 0; i < kKeys; ++i) {
        const Float tail = LoadAs<Format>(keys[i] + last_offset_);
        const Float k = lanes >= overlap_ ? tail : Float{};
        for (int r = 0; r < kRows; ++r) {
          sums[r * kKeys + i] += Load(scratch_.queries[row + r][num_vectors_ - 1]) * k;
        }
      }
    }
    const Float scores = SumEach<kWidth>(sums);
    if constexpr (kRows == 1) {
      Store(scratch_.weights[row] + key, scores);
    } else {
      for (int r = 0; r < kRows; ++r) {
        for (int i = 0; i < kKeys; ++i) scratch_.weights[row + r][key + i] = scores[r * kKeys + i];
      }
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
    const int64_t token = (task_.row_begin + row) / problem_.group_size;
    const Int diagonal =
        SplatInt(static_cast<int32_t>(token + sequence.length - sequence.num_queries));
    for (int64_t i = begin; i < end; i += kWidth) {
      Float score = Load(scratch_.weights[row] + i);
      if (softcap_ > 0.0f) score = Tanh(score) * (softcap_ * kLog2E);
      if (alibi_) {
        const Int distance = diagonal - Load(list.position + i);
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
  int64_t head_size_, last_offset_;
  int32_t overlap_;  // lanes of the last vector that the one before covers
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
