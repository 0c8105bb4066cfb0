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

int64_t TileScratchBytes(const AttentionProblem& problem) {
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

// out[row] = rescale[row] * out[row] + sum over keys [begin, end) of weights[key][row] *
// values[key], for kRows rows and kValueBlock elements.
template <int kStride, int kRows>
void AddValues(const float* values, const float* weights, const float* rescale, int64_t begin,
               int64_t end, float* out, int64_t out_stride) {
  AddProduct<kRows, 1, kPanelRows>(weights + begin * kPanelRows, values + begin * kStride, kStride,
                                   end - begin, out, out_stride,
                                   [rescale](int m) { return rescale[m]; });
}

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

template <int kMaxDims>
class TileAttention {
 public:
  TileAttention(const AttentionProblem& problem, const AttentionTask& task, void* memory)
      : problem_(problem), task_(task), scratch_(*static_cast<TileScratch*>(memory)) {
    head_size_ = problem.head_size;
    v_head_size_ = problem.v_head_size;
    padded_v_head_size_ = PaddedHeadSize(v_head_size_);
    num_rows_ = task.row_end - task.row_begin;
    num_panels_ = (num_rows_ + kPanelRows - 1) / kPanelRows;
    float* p =
        reinterpret_cast<float*>(static_cast<char*>(memory) + (sizeof(TileScratch) + 63) / 64 * 64);
    scratch_.keys = p, p += kTileKeys * kStride;
    scratch_.values = p, p += kTileKeys * kStride;
    scratch_.out = p, p += MaxTileRows(problem) * padded_v_head_size_;
    scratch_.queries = p;
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
      bool finite = true;
      for (int64_t i = 0; i < now->size; ++i) {
        LoadRow<Format>(now->key[i], problem_.k.stride_dim, head_size_,
                        scratch_.keys + i * kStride);
        finite &= LoadRow<Format>(now->value[i], problem_.v.stride_dim, v_head_size_,
                                  scratch_.values + i * kStride);
      }
      // Keys that pad the last register block. Their scores are not used, but denormal numbers
      // would make them slow.
      for (int64_t i = now->size; i % kScoreKeys != 0; ++i) {
        __builtin_memset(scratch_.keys + i * kStride, 0, head_size_ * sizeof(float));
      }
      ListTile(&position, next);
      prefetcher_.row_bytes = head_size_ * static_cast<int64_t>(sizeof(typename Format::Bits));
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
  static constexpr int kStride = kTileStride<kMaxDims>;

  // Lists the keys of the next tile; an empty list at the end.
  void ListTile(int64_t* position, KeyList* list) const {
    list->size = 0;
    while (list->size == 0 && *position < task_.key_end) {
      problem_.ListKeys(*task_.sequence, task_.kv_head_begin, position, task_.key_end, kTileKeys,
                        list);
    }
  }

  void LoadQueries() {
    const ListedSequence& sequence = *task_.sequence;
    const float scale = problem_.ScoreScale(sequence, task_.kv_head_begin);
    // Scores are in base 2, or in units of the softcap.
    const float factor = softcap_ > 0.0f ? scale / softcap_ : scale * kLog2e;
    float* row_values = scratch_.keys;
    for (int64_t row = 0; row < num_panels_ * kPanelRows; ++row) {
      float* lane =
          scratch_.queries + row / kPanelRows * kPanelRows * head_size_ + row % kPanelRows;
      // Rows past the last one repeat it. They are computed but not stored.
      const int64_t real_row = task_.row_begin + Min(row, num_rows_ - 1);
      const int64_t i = real_row / problem_.group_size;
      const int64_t head =
          task_.kv_head_begin * problem_.group_size + real_row % problem_.group_size;
      LoadQuery(problem_, task_, task_.kv_head_begin, real_row, row_values);
      for (int64_t d = 0; d < head_size_; ++d) lane[d * kPanelRows] = row_values[d] * factor;
      const KeyRange range = problem_.Visible(sequence, i);
      scratch_.visible_begin[row] = range.begin;
      scratch_.visible_end[row] = range.end;
      scratch_.diagonal[row] = static_cast<int32_t>(i + sequence.length - sequence.num_queries);
      scratch_.slope[row] = alibi_ ? problem_.AlibiSlope(sequence, head) * kLog2e : 0.0f;
      scratch_.row_max[row] = -kInfinity;
      scratch_.row_sum[row] = 0.0f;
    }
    __builtin_memset(scratch_.out, 0,
                     num_panels_ * kPanelRows * padded_v_head_size_ * sizeof(float));
    // The padding past the head size is multiplied too, and not stored. Denormal numbers in it
    // would make the products slow.
    for (int64_t i = 0; v_head_size_ != padded_v_head_size_ && i < kTileKeys; ++i) {
      __builtin_memset(scratch_.values + i * kStride + v_head_size_, 0,
                       (padded_v_head_size_ - v_head_size_) * sizeof(float));
    }
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
    if (masked) {
      for (int64_t i = 0; i < kPanelRows; ++i) {
        scratch_.tile_begin[i] = IndexOf(list, scratch_.visible_begin[row + i]);
        scratch_.tile_end[i] = IndexOf(list, scratch_.visible_end[row + i]);
      }
    }
    switch ((rows + kWidth - 1) / kWidth) {
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
    for (int64_t d = 0; d < v_head_size_; d += kValueBlock) {
      if (masked && !finite) {
        // 0 times infinity or NaN would be NaN: add exactly the visible keys, row by row.
        for (int64_t i = 0; i < rows; ++i) {
          AddRows<1>(scratch_.tile_begin[i], scratch_.tile_end[i], out, i, d);
        }
        continue;
      }
      int64_t i = 0;
      for (; i + kValueRows <= rows; i += kValueRows) AddRows<kValueRows>(begin, end, out, i, d);
      for (; i < rows; i += kFewValueRows) AddRows<kFewValueRows>(begin, end, out, i, d);
    }
  }

  // Adds the values of keys [begin, end) to kRows rows of a panel, kValueBlock elements from d on.
  template <int kRows>
  void AddRows(int64_t begin, int64_t end, float* out, int64_t row, int64_t d) {
    AddValues<kStride, kRows>(scratch_.values + d, scratch_.weights[0] + row,
                              scratch_.rescale + row, begin, end,
                              out + row * padded_v_head_size_ + d, padded_v_head_size_);
  }

  // Online softmax: computes the weights of keys [begin, end) of the list for kVectors vectors of
  // rows, and updates the rows' state.
  template <int kVectors>
  void ComputeWeights(const KeyList& list, int64_t row, int64_t begin, int64_t end, bool masked) {
    ScorePanel<kStride, kVectors>(scratch_.keys, scratch_.queries + row * head_size_, head_size_,
                                  begin / kScoreKeys * kScoreKeys,
                                  (end + kScoreKeys - 1) / kScoreKeys * kScoreKeys,
                                  scratch_.weights, [this] { prefetcher_.Step(); });
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
    for (int64_t key = begin; key < end; ++key) {
      for (int v = 0; v < kVectors; ++v) {
        float* p = scratch_.weights[key] + v * kWidth;
        const Float weight = Exp2(Load(p) - base[v]);
        tile_sum[v] += weight;
        Store(p, weight);
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
  int64_t head_size_, v_head_size_, padded_v_head_size_, num_rows_, num_panels_;
  float softcap_;
  bool alibi_;
  Prefetcher prefetcher_;
};

void AttendTiles(const AttentionProblem& problem, const AttentionTask& task, void* scratch) {
  WithFormat(problem.args->kv_dtype, [&](auto format) {
    using Format = decltype(format);
    if (LargerHeadSize(problem) <= kUsualDims) {
      TileAttention<kUsualDims>(problem, task, scratch).template Run<Format>();
    } else {
      TileAttention<kMaxHeadSize>(problem, task, scratch).template Run<Format>();
    }
  });
}

}  // namespace
}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CPU_ATTENTION_TILES_H_
