// Attention for many rows: tiles of keys times panels of query rows.
//
// Scores come out as [key][row], with a row per vector lane, so the softmax needs no operations
// across lanes.
#ifndef FLASHXLA_CSRC_CPU_ATTENTION_TILES_H_
#define FLASHXLA_CSRC_CPU_ATTENTION_TILES_H_

#include "common/attention_arguments.h"
#include "common/math_constants.h"
#include "cpu/attention_engine.h"
#include "cpu/attention_products.h"
#include "cpu/simd.h"

namespace flashxla {
namespace {

int64_t PaddedHeadSize(int64_t head_size) {
  return (head_size + kValueBlock - 1) / kValueBlock * kValueBlock;
}

// Scratch memory of a task; the arrays behind the pointers follow the struct (TileScratchBytes).
struct TileScratch {
  float* keys;                           // [kTileKeys][kTileStride]
  float* values;                         // [kTileKeys][kTileStride]
  float* queries;                        // [panel][head_size][kPanelRows]
  float* out;                            // [row][padded v_head_size]
  float weights[kTileKeys][kPanelRows];  // scores, then 2^(score - row_max)
  float row_max[kMaxRows], row_sum[kMaxRows], slope[kMaxRows];
  int32_t diagonal[kMaxRows];                              // the row's position among the keys
  int32_t visible_begin[kMaxRows], visible_end[kMaxRows];  // positions
  float rescale[kPanelRows];                               // factor of the output so far
  int32_t tile_begin[kPanelRows], tile_end[kPanelRows];    // visible keys, as list indices
};

inline int64_t TileScratchBytes(const AttentionProblem& problem) {
  const int64_t stride =
      LargerHeadSize(problem) <= kUsualDims ? kTileStride<kUsualDims> : kTileStride<kMaxHeadSize>;
  return static_cast<int64_t>(sizeof(TileScratch)) + 64 +
         4 * (2 * kTileKeys * stride +
              MaxTileRows(problem) * (problem.head_size + PaddedHeadSize(problem.v_head_size)));
}

// Prefetches the next tile's rows bit by bit while this tile is computed.
struct Prefetcher {
  const KeyList* list;
  int64_t row_bytes, rows_per_step, next;

  void Step() {
    for (const int64_t end = Min(next + rows_per_step, list->size); next < end; ++next) {
      for (int64_t byte = 0; byte < row_bytes; byte += 64) {
        __builtin_prefetch(list->key[next] + byte, 0, 2);
        __builtin_prefetch(list->value[next] + byte, 0, 2);
      }
    }
  }
};

// The products of a task in float, as its storage wants them. A tile's keys are
// [key][kStride], its values too; a panel's queries [dim][row], multiplied by the scores' factor.
template <int kMaxDims>
class FloatProducts {
 public:
  static constexpr int kStride = kTileStride<kMaxDims>;
  static constexpr int kTogether = 1;  // keys whose weights are multiplied by one instruction

  FloatProducts(const AttentionProblem& problem, const TileScratch& scratch, float factor)
      : problem_(problem),
        scratch_(scratch),
        head_size_(problem.head_size),
        v_head_size_(problem.v_head_size),
        padded_v_head_size_(PaddedHeadSize(v_head_size_)),
        factor_(factor) {
    // The padding past the head size is multiplied too, and not stored. Denormal numbers in it
    // would make the products slow.
    for (int64_t i = 0; v_head_size_ != padded_v_head_size_ && i < kTileKeys; ++i) {
      __builtin_memset(scratch_.values + i * kStride + v_head_size_, 0,
                       (padded_v_head_size_ - v_head_size_) * sizeof(float));
    }
  }

  // Loads kWidth rows, the first of which is `row`.
  void LoadQueries(const char* const* rows, int64_t row) {
    float values[kWidth][kMaxHeadSize];
    for (int i = 0; i < kWidth; ++i) {
      WithFormat(problem_.q.dtype, [&](auto format) {
        LoadRow<decltype(format)>(rows[i], problem_.q.stride_dim, head_size_, values[i]);
      });
      for (int64_t d = 0; d < head_size_; ++d) values[i][d] *= factor_;
    }
    StoreLanes(values[0], kMaxHeadSize, head_size_,
               scratch_.queries + row / kPanelRows * kPanelRows * head_size_ + row % kPanelRows);
  }

  // Returns whether all values are finite.
  template <typename Format>
  bool LoadTile(const KeyList& list) {
    bool finite = true;
    for (int64_t i = 0; i < list.size; ++i) {
      LoadRow<Format>(list.key[i], problem_.k.stride_dim, head_size_, scratch_.keys + i * kStride);
      finite &= LoadRow<Format>(list.value[i], problem_.v.stride_dim, v_head_size_,
                                scratch_.values + i * kStride);
    }
    // Keys that pad the last register block. Their scores are not used, but denormal numbers
    // would make them slow.
    for (int64_t i = list.size; i % kScoreKeys != 0; ++i) {
      __builtin_memset(scratch_.keys + i * kStride, 0, head_size_ * sizeof(float));
    }
    return finite;
  }

  // The scores of kScoreKeys keys and kVectors vectors of rows from `row` on.
  template <int kVectors>
  void Score(int64_t key, int64_t row, float (*scores)[kPanelRows]) const {
    const float* panel = scratch_.queries + row / kPanelRows * kPanelRows * head_size_;
    ScoreBlock<kStride, kVectors>(scratch_.keys + key * kStride, panel + row % kPanelRows,
                                  head_size_, scores);
  }

  // Stores the weights of kTogether keys and a vector of rows where AddRows reads them.
  static void StoreWeights(const Float* weights, float* dst) { Store(dst, weights[0]); }

  // out[row] = rescale[row] * out[row] + sum over keys [begin, end) of weights[key][row] *
  // values[key], for kRows rows and kValueBlock elements from d on.
  template <int kRows>
  void AddRows(const float* weights, const float* rescale, int64_t begin, int64_t end, int64_t d,
               float* out) const {
    AddProduct<kRows, 1, kPanelRows>(
        weights + begin * kPanelRows, scratch_.values + begin * kStride + d, kStride, end - begin,
        out + d, padded_v_head_size_, [rescale](int m) { return rescale[m]; });
  }

  // The same for one row, which multiplies no other key's values.
  void AddRowAlone(const float* weights, const float* rescale, int64_t begin, int64_t end,
                   int64_t d, float* out) const {
    AddRows<1>(weights, rescale, begin, end, d, out);
  }

 private:
  const AttentionProblem& problem_;
  const TileScratch& scratch_;
  const int64_t head_size_, v_head_size_, padded_v_head_size_;
  const float factor_;
};

// The first index of the list whose position is at least `position`.
inline int32_t IndexOf(const KeyList& list, int32_t position) {
  int32_t begin = 0, end = static_cast<int32_t>(list.size);
  if (list.position[end - 1] - list.position[0] == end - 1) {  // no keys are missing
    const int64_t index = static_cast<int64_t>(position) - list.position[0];
    return static_cast<int32_t>(Min<int64_t>(Max<int64_t>(index, 0), end));
  }
  while (begin < end) {
    const int32_t middle = (begin + end) / 2;
    if (list.position[middle] < position) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

template <typename Products>
class TileAttention {
 public:
  TileAttention(const AttentionProblem& problem, const AttentionTask& task, void* memory)
      : problem_(problem),
        task_(task),
        scratch_(PlaceArrays(problem, memory)),
        products_(problem, scratch_, ScoreFactor(problem, task)) {
    padded_v_head_size_ = PaddedHeadSize(problem.v_head_size);
    num_rows_ = task.row_end - task.row_begin;
    num_panels_ = (num_rows_ + kPanelRows - 1) / kPanelRows;
    softcap_ = static_cast<float>(problem.args->softcap);
    alibi_ = problem.args->alibi_slopes.data != nullptr;
  }

  template <typename Format>
  void Run() {
    LoadQueries();
    KeyList lists[2];
    KeyList *now = &lists[0], *next = &lists[1];
    int64_t position = task_.key_begin;
    for (ListTile(&position, now); now->size > 0;) {
      const bool finite = products_.template LoadTile<Format>(*now);
      ListTile(&position, next);
      prefetcher_.row_bytes =
          problem_.head_size * static_cast<int64_t>(sizeof(typename Format::Bits));
      prefetcher_.rows_per_step = (kScoreKeys + num_panels_ - 1) / num_panels_;
      prefetcher_.next = 0;
      prefetcher_.list = next;
      for (int64_t panel = 0; panel < num_panels_; ++panel) AttendPanel(*now, panel, finite);
      KeyList* done = now;
      now = next, next = done;
    }
    for (int64_t row = 0; row < num_rows_; ++row) {
      FinishRow(problem_, task_, task_.kv_head_begin, task_.row_begin + row,
                scratch_.out + row * padded_v_head_size_,
                {scratch_.row_max[row], scratch_.row_sum[row]});
    }
  }

 private:
  static TileScratch& PlaceArrays(const AttentionProblem& problem, void* memory) {
    TileScratch& scratch = *static_cast<TileScratch*>(memory);
    float* p =
        reinterpret_cast<float*>(static_cast<char*>(memory) + (sizeof(TileScratch) + 63) / 64 * 64);
    scratch.keys = p, p += kTileKeys * Products::kStride;
    scratch.values = p, p += kTileKeys * Products::kStride;
    scratch.out = p, p += MaxTileRows(problem) * PaddedHeadSize(problem.v_head_size);
    scratch.queries = p;
    return scratch;
  }

  // Scores are in base 2, or in units of the softcap.
  static float ScoreFactor(const AttentionProblem& problem, const AttentionTask& task) {
    const float scale = problem.ScoreScale(*task.sequence, task.kv_head_begin);
    const float softcap = static_cast<float>(problem.args->softcap);
    return softcap > 0.0f ? scale / softcap : scale * kLog2e;
  }

  // Lists the keys of the next tile; an empty list at the end.
  void ListTile(int64_t* position, KeyList* list) const {
    list->size = 0;
    const bool invariant = problem_.args->batch_invariant != 0;
    while (list->size == 0 && *position < task_.key_end) {
      // A row's sums are rescaled from tile to tile, so where a tile ends must not depend on where
      // the task begins.
      const int64_t tile_end = (*position / kTileKeys + 1) * kTileKeys;
      const int64_t end = invariant ? Min(tile_end, task_.key_end) : task_.key_end;
      problem_.ListKeys(*task_.sequence, task_.kv_head_begin, position, end, kTileKeys, list);
    }
    if (invariant && list->size > 0) PairByPosition(list);
  }

  // Keys that are multiplied together are those of an even position and the next one. Where the
  // task begins at an odd position its first key stands in for the one before, which no row sees.
  void PairByPosition(KeyList* list) const {
    static_assert(Products::kTogether <= 2 && kTileKeys % 2 == 0);
    if (list->position[0] % Products::kTogether == 0 || list->position[0] != task_.key_begin) {
      return;
    }
    for (int64_t i = list->size; i > 0; --i) {
      list->key[i] = list->key[i - 1];
      list->value[i] = list->value[i - 1];
      list->position[i] = list->position[i - 1];
    }
    --list->position[0];
    ++list->size;
  }

  void LoadQueries() {
    const ListedSequence& sequence = *task_.sequence;
    const RowView& q = problem_.q;
    for (int64_t first = 0; first < num_rows_; first += kWidth) {
      const char* rows[kWidth];
      for (int64_t row = first; row < first + kWidth; ++row) {
        // Rows past the last one repeat it. They are computed but not stored.
        const int64_t real_row = task_.row_begin + Min(row, num_rows_ - 1);
        const int64_t i = real_row / problem_.group_size;
        const int64_t head =
            task_.kv_head_begin * problem_.group_size + real_row % problem_.group_size;
        const int64_t token = sequence.first_query + i;
        rows[row - first] =
            q.data + (token * q.stride_token + head * q.stride_head) * ElementSize(q.dtype);
        const KeyRange range = problem_.Visible(sequence, i);
        scratch_.visible_begin[row] = range.begin;
        scratch_.visible_end[row] = range.end;
        scratch_.diagonal[row] = static_cast<int32_t>(i + sequence.length - sequence.num_queries);
        scratch_.slope[row] = alibi_ ? problem_.AlibiSlope(sequence, head) * kLog2e : 0.0f;
        scratch_.row_max[row] = -kInfinity;
        scratch_.row_sum[row] = 0.0f;
      }
      products_.LoadQueries(rows, first);
    }
    __builtin_memset(scratch_.out, 0, NumLanes(num_rows_) * padded_v_head_size_ * sizeof(float));
  }

  void AttendPanel(const KeyList& list, int64_t panel, bool finite) {
    const int64_t row = panel * kPanelRows;
    const int64_t rows = Min<int64_t>(num_rows_ - row, kPanelRows);
    // Both ends of a row's visible keys grow with the row.
    const int64_t last = row + rows - 1;
    const int64_t begin = IndexOf(list, scratch_.visible_begin[row]);
    const int64_t end = IndexOf(list, scratch_.visible_end[last]);
    if (begin >= end) return;
    const bool masked = IndexOf(list, scratch_.visible_begin[last]) > begin ||
                        IndexOf(list, scratch_.visible_end[row]) < end;
    // 0 times infinity or NaN would be NaN: add exactly the visible keys, row by row.
    const bool alone = !finite && (masked || Products::kTogether > 1);
    if (masked || alone) {
      for (int64_t i = 0; i < NumLanes(rows); ++i) {
        scratch_.tile_begin[i] = IndexOf(list, scratch_.visible_begin[row + i]);
        scratch_.tile_end[i] = IndexOf(list, scratch_.visible_end[row + i]);
      }
    }
    switch (NumLanes(rows) / kWidth) {
      case 1:
        ComputeWeights<1>(list, row, begin, end, masked);
        break;
      case 2:
        ComputeWeights<2>(list, row, begin, end, masked);
        break;
      default:
        ComputeWeights<kPanelVectors>(list, row, begin, end, masked);
    }
    float* out = scratch_.out + row * padded_v_head_size_;
    for (int64_t d = 0; d < problem_.v_head_size; d += kValueBlock) {
      if (alone) {
        for (int64_t i = 0; i < rows; ++i) {
          products_.AddRowAlone(scratch_.weights[0] + i, scratch_.rescale + i,
                                scratch_.tile_begin[i], scratch_.tile_end[i], d,
                                out + i * padded_v_head_size_);
        }
        continue;
      }
      int64_t i = 0;
      for (; i + kValueRows <= rows; i += kValueRows) {
        AddRows<kValueRows>(begin, end, masked, out, i, d);
      }
      for (; i < rows; i += kFewValueRows) AddRows<kFewValueRows>(begin, end, masked, out, i, d);
    }
  }

  // Adds the values of keys [begin, end), or of those that a row among them sees, to kRows rows of
  // a panel, kValueBlock elements from d on.
  template <int kRows>
  void AddRows(int64_t begin, int64_t end, bool masked, float* out, int64_t row, int64_t d) {
    if (masked) {
      begin = scratch_.tile_begin[row];
      end = Max<int64_t>(scratch_.tile_end[row + kRows - 1], begin);
    }
    products_.template AddRows<kRows>(scratch_.weights[0] + row, scratch_.rescale + row, begin, end,
                                      d, out + row * padded_v_head_size_);
  }

  // Computes the scores of keys [begin, end) of the list for kVectors vectors of rows; with a mask,
  // only where a row of a vector sees a key of a block.
  template <int kVectors>
  void ComputeScores(int64_t row, int64_t begin, int64_t end, bool masked) {
    int first = 0, behind = masked ? 0 : kVectors;  // vectors that need the block
    for (int64_t key = begin / kScoreKeys * kScoreKeys; key < end; key += kScoreKeys) {
      prefetcher_.Step();
      if (masked) {
        while (first < kVectors && scratch_.tile_end[first * kWidth + kWidth - 1] <= key) ++first;
        while (behind < kVectors && scratch_.tile_begin[behind * kWidth] < key + kScoreKeys) {
          ++behind;
        }
      }
      float (*scores)[kPanelRows] =
          reinterpret_cast<float (*)[kPanelRows]>(scratch_.weights[key] + first * kWidth);
      const int64_t first_row = row + first * kWidth;
      if (behind - first == kVectors) {
        products_.template Score<kVectors>(key, first_row, scores);
      } else if (behind - first == 2) {
        products_.template Score<2>(key, first_row, scores);
      } else if (behind - first == 1) {
        products_.template Score<1>(key, first_row, scores);
      }
    }
  }

  // Online softmax: computes the weights of keys [begin, end) of the list for kVectors vectors of
  // rows, and updates the rows' state.
  template <int kVectors>
  void ComputeWeights(const KeyList& list, int64_t row, int64_t begin, int64_t end, bool masked) {
    ComputeScores<kVectors>(row, begin, end, masked);
    if (softcap_ > 0.0f || alibi_ || masked) {
      for (int v = 0; v < kVectors; ++v) AdjustScores(list, row, v * kWidth, begin, end, masked);
    }
    Float row_max[kVectors], base[kVectors], tile_sum[kVectors] = {};
    for (int v = 0; v < kVectors; ++v) row_max[v] = Load(scratch_.row_max + row + v * kWidth);
    for (int64_t key = begin; key < end; ++key) {
      for (int v = 0; v < kVectors; ++v) {
        const Float score = Load(scratch_.weights[key] + v * kWidth);
        row_max[v] = score > row_max[v] ? score : row_max[v];
      }
    }
    for (int v = 0; v < kVectors; ++v) base[v] = row_max[v] == -kInfinity ? Float{} : row_max[v];
    // Keys that complete a group weigh nothing.
    constexpr int kTogether = Products::kTogether;
    for (; begin % kTogether != 0; --begin) Hide(begin - 1);
    for (; end % kTogether != 0; ++end) Hide(end);
    for (int64_t key = begin; key < end; key += kTogether) {
      for (int v = 0; v < kVectors; ++v) {
        float* p = scratch_.weights[key] + v * kWidth;
        Float weights[kTogether];
        for (int i = 0; i < kTogether; ++i) {
          weights[i] = Exp2(Load(p + i * kPanelRows) - base[v]);
          tile_sum[v] += weights[i];
        }
        Products::StoreWeights(weights, p);
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      const int64_t i = row + v * kWidth;
      const Float rescale = Exp2(Load(scratch_.row_max + i) - base[v]);
      Store(scratch_.rescale + v * kWidth, rescale);
      Store(scratch_.row_sum + i, Load(scratch_.row_sum + i) * rescale + tile_sum[v]);
      Store(scratch_.row_max + i, row_max[v]);
    }
  }

  void Hide(int64_t key) {
    for (int v = 0; v < kPanelVectors; ++v) {
      Store(scratch_.weights[key] + v * kWidth, Splat(-kInfinity));
    }
  }

  // Applies softcap, ALiBi and the mask to the scores of one vector of rows.
  void AdjustScores(const KeyList& list, int64_t row, int64_t lane, int64_t begin, int64_t end,
                    bool masked) {
    const Float slope = Load(scratch_.slope + row + lane);
    const Int diagonal = Load(scratch_.diagonal + row + lane);
    const Int first = Load(scratch_.tile_begin + lane), behind = Load(scratch_.tile_end + lane);
    const float cap = softcap_ * kLog2e;
    for (int64_t key = begin; key < end; ++key) {
      float* p = scratch_.weights[key] + lane;
      Float score = Load(p);
      if (softcap_ > 0.0f) score = Tanh(score) * cap;
      if (alibi_) {
        // Unsigned, so that an overflow is defined.
        const Int distance = (Int)((Uint)diagonal - (uint32_t)list.position[key]);
        score -= slope * Abs(__builtin_convertvector(distance, Float));
      }
      if (masked) {
        const Int index = SplatInt(static_cast<int32_t>(key));
        const Float hidden = Splat(-kInfinity);
        score = index >= first ? score : hidden;
        score = index < behind ? score : hidden;
      }
      Store(p, score);
    }
  }

  const AttentionProblem& problem_;
  const AttentionTask& task_;
  TileScratch& scratch_;
  Products products_;
  int64_t padded_v_head_size_, num_rows_, num_panels_;
  float softcap_;
  bool alibi_;
  Prefetcher prefetcher_;
};

inline void AttendTiles(const AttentionProblem& problem, const AttentionTask& task, void* scratch) {
  WithFormat(problem.args->kv_dtype, [&](auto format) {
    using Format = decltype(format);
    if (LargerHeadSize(problem) <= kUsualDims) {
      TileAttention<FloatProducts<kUsualDims>>(problem, task, scratch).template Run<Format>();
    } else {
      TileAttention<FloatProducts<kMaxHeadSize>>(problem, task, scratch).template Run<Format>();
    }
  });
}

}  // namespace
}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CPU_ATTENTION_TILES_H_
