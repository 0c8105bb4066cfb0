// Attention's gradients: tiles of keys times panels of query rows, as attention_tiles.h.
//
// A block of rows is read once. For each tile of keys, scores and dot(grad_out, v) are computed as
// [key][row]; from them the weights and the scores' gradients; and from those what the tile adds to
// the gradients of keys and values (sums in memory) and of the block's queries (scratch memory).
#ifndef FLASHXLA_CSRC_CPU_ATTENTION_BACKWARD_TILES_H_
#define FLASHXLA_CSRC_CPU_ATTENTION_BACKWARD_TILES_H_

#include "common/math_constants.h"
#include "cpu/attention_backward_engine.h"
#include "cpu/attention_products.h"
#include "cpu/simd.h"

namespace flashxla {
namespace {

static_assert(kGradientBlock % kValueBlock == 0 && kScoreKeys <= kGradientSpareRows);

// Distance between rows: an odd number of cache lines, as kTileStride.
int64_t RowStride(int64_t head_size) {
  return (head_size + kGradientBlock - 1) / kGradientBlock * kGradientBlock + 16;
}

// Scratch memory of a block; the arrays behind the pointers follow the struct.
struct BackwardScratch {
  float* keys;                               // [kTileKeys][kTileStride]
  float* values;                             // [kTileKeys][kTileStride]
  float* queries;                            // [row][RowStride]
  float* grad_out;                           // [row][RowStride]
  float* grad_q;                             // [row][RowStride]
  float* query_panels;                       // [panel][head_size][kPanelRows], scaled
  float* grad_out_panels;                    // [panel][v_head_size][kPanelRows]
  float weights[kTileKeys][kPanelRows];      // scores, then weights
  float grad_scores[kTileKeys][kPanelRows];  // dot(grad_out, v), then the scores' gradients
  float lse[kMaxRows], delta[kMaxRows];      // lse in base 2
  float slope[kMaxRows];                     // in base 2
  int32_t diagonal[kMaxRows];                // the row's position among the keys
  int32_t visible_begin[kMaxRows], visible_end[kMaxRows];  // positions
  int32_t tile_begin[kPanelRows], tile_end[kPanelRows];    // visible keys of the tile
  bool finite[kMaxPanels];  // whether all that was read of the panel is
};

int64_t BackwardScratchBytes(const AttentionProblem& problem) {
  const int64_t stride =
      LargerHeadSize(problem) <= kUsualDims ? kTileStride<kUsualDims> : kTileStride<kMaxHeadSize>;
  const int64_t d = problem.head_size, d_v = problem.v_head_size;
  return static_cast<int64_t>(sizeof(BackwardScratch)) + 64 +
         4 * (2 * kTileKeys * stride +
              MaxTileRows(problem) * (2 * RowStride(d) + RowStride(d_v) + d + d_v));
}

inline bool AreFinite(const float* values, int64_t n) {
  constexpr int32_t kMagnitude = 0x7fffffff, kInfinite = 0x7f800000;
  Int magnitudes = {};
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    const Int magnitude = (Int)Load(values + i) & kMagnitude;
    magnitudes = magnitude > magnitudes ? magnitude : magnitudes;
  }
  int32_t largest = 0;
  for (int lane = 0; lane < kWidth; ++lane) largest = Max(largest, magnitudes[lane]);
  for (; i < n; ++i) {
    largest = Max(largest, static_cast<int32_t>(BitsOf(values[i])) & kMagnitude);
  }
  return largest < kInfinite;
}

inline float Dot(const float* a, const float* b, int64_t n) {
  Float sums = {};
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) sums += Load(a + i) * Load(b + i);
  float sum = 0.0f;
  for (int lane = 0; lane < kWidth; ++lane) sum += sums[lane];
  for (; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// Of AddProduct: sums keep what they have.
struct Whole {
  float operator()(int) const { return 1.0f; }
};

template <int kMaxDims>
class TileBackward {
 public:
  TileBackward(const AttentionBackwardProblem& problem, const BackwardBlock& block, int64_t kv_head,
               const KeyGradients& sums, double* grad_sinks, void* memory)
      : problem_(problem),
        forward_(problem.forward),
        block_(block),
        sums_(sums),
        scratch_(*static_cast<BackwardScratch*>(memory)),
        grad_sinks_(grad_sinks),
        kv_head_(kv_head) {
    head_size_ = forward_.head_size, v_head_size_ = forward_.v_head_size;
    stride_ = RowStride(head_size_), v_stride_ = RowStride(v_head_size_);
    num_rows_ = block.row_end - block.row_begin;
    num_panels_ = (num_rows_ + kPanelRows - 1) / kPanelRows;
    const int64_t rows = MaxTileRows(forward_);
    float* p = reinterpret_cast<float*>(static_cast<char*>(memory) +
                                        (sizeof(BackwardScratch) + 63) / 64 * 64);
    auto take = [&p](int64_t size) {
      float* const array = p;
      p += size;
      return array;
    };
    scratch_.keys = take(kTileKeys * kStride);
    scratch_.values = take(kTileKeys * kStride);
    scratch_.queries = take(rows * stride_);
    scratch_.grad_q = take(rows * stride_);
    scratch_.grad_out = take(rows * v_stride_);
    scratch_.query_panels = take(rows * head_size_);
    scratch_.grad_out_panels = take(rows * v_head_size_);
    softcap_ = static_cast<float>(problem.args->softcap);
    alibi_ = problem.args->alibi_slopes.data != nullptr;
  }

  template <typename Format>
  void Run() {
    ReadRows();
    ClearTile();
    for (int64_t first = block_.key_begin; first < block_.key_end; first += kTileKeys) {
      tile_first_ = static_cast<int32_t>(first);
      tile_size_ = static_cast<int32_t>(Min<int64_t>(block_.key_end - first, kTileKeys));
      const bool finite = LoadTile<Format>();
      for (int64_t panel = 0; panel < num_panels_; ++panel) AddPanel(panel, finite);
    }
    const float scale = static_cast<float>(problem_.args->softmax_scale);
    for (int64_t row = 0; row < num_rows_; ++row) {
      WriteRow(problem_.grad_q, TokenOf(row), HeadOf(row), head_size_,
               scratch_.grad_q + row * stride_, scale);
    }
  }

 private:
  static constexpr int kStride = kTileStride<kMaxDims>;

  int64_t TokenOf(int64_t row) const {
    return block_.sequence->first_query + (block_.row_begin + row) / forward_.group_size;
  }
  int64_t HeadOf(int64_t row) const {
    return kv_head_ * forward_.group_size + (block_.row_begin + row) % forward_.group_size;
  }

  void ReadRows() {
    const ListedSequence& sequence = *block_.sequence;
    const float scale = static_cast<float>(problem_.args->softmax_scale);
    // Scores are in base 2, or in units of the softcap.
    const float factor = softcap_ > 0.0f ? scale / softcap_ : scale * kLog2e;
    const int64_t num_rows = NumLanes(num_rows_);
    __builtin_memset(scratch_.queries, 0, num_rows * stride_ * sizeof(float));
    __builtin_memset(scratch_.grad_q, 0, num_rows * stride_ * sizeof(float));
    __builtin_memset(scratch_.grad_out, 0, num_rows * v_stride_ * sizeof(float));
    for (int64_t panel = 0; panel < num_panels_; ++panel) scratch_.finite[panel] = true;
    for (int64_t row = 0; row < num_rows; ++row) {
      // Rows past the last one repeat it. They are computed but not added to anything.
      const int64_t real_row = Min(row, num_rows_ - 1);
      const int64_t token = TokenOf(real_row), head = HeadOf(real_row);
      const int64_t i = token - sequence.first_query;
      float* q = scratch_.queries + row * stride_;
      float* grad_out = scratch_.grad_out + row * v_stride_;
      ReadRow(forward_.q, token, head, head_size_, q);
      ReadRow(problem_.grad_out, token, head, v_head_size_, grad_out);
      scratch_.finite[row / kPanelRows] &=
          AreFinite(q, head_size_) && AreFinite(grad_out, v_head_size_);
      float out[kMaxValueHeadSize];
      ReadRow(forward_.out, token, head, v_head_size_, out);
      const float lse = problem_.Lse(token, head);
      const float delta = Dot(grad_out, out, v_head_size_) - problem_.GradLse(token, head);
      // A row of lse -inf has no weights.
      scratch_.lse[row] = lse == -kInfinity ? kInfinity : lse * kLog2e;
      scratch_.delta[row] = delta;
      scratch_.slope[row] = alibi_ ? forward_.AlibiSlope(sequence, head) * kLog2e : 0.0f;
      scratch_.diagonal[row] = static_cast<int32_t>(i + sequence.length - sequence.num_queries);
      const KeyRange range = forward_.Visible(sequence, i);
      scratch_.visible_begin[row] = range.begin;
      scratch_.visible_end[row] = range.end;
      const float sink = row < num_rows_ ? forward_.Sink(head) : -kInfinity;
      if (sink != -kInfinity) {
        grad_sinks_[head % forward_.group_size] -=
            double{Exp2(Splat(Min((sink - lse) * kLog2e, 127.0f)))[0]} * delta;
      }
    }
    for (int64_t row = 0; row < num_rows; row += kWidth) {
      const int64_t panel = row / kPanelRows * kPanelRows, lane = row % kPanelRows;
      float scaled[kWidth][kMaxHeadSize];
      for (int64_t i = 0; i < kWidth; ++i) {
        const float* q = scratch_.queries + (row + i) * stride_;
        for (int64_t d = 0; d < head_size_; ++d) scaled[i][d] = q[d] * factor;
      }
      StoreLanes(scaled[0], kMaxHeadSize, head_size_,
                 scratch_.query_panels + panel * head_size_ + lane);
      StoreLanes(scratch_.grad_out + row * v_stride_, v_stride_, v_head_size_,
                 scratch_.grad_out_panels + panel * v_head_size_ + lane);
    }
  }

  // The padding of a tile's rows is multiplied too, and not used. Denormal numbers in it would make
  // the products slow.
  void ClearTile() {
    for (int64_t i = 0; i < kTileKeys; ++i) {
      __builtin_memset(scratch_.keys + i * kStride + head_size_, 0,
                       (kStride - head_size_) * sizeof(float));
    }
  }

  // Returns whether all elements are finite.
  template <typename Format>
  bool LoadTile() {
    const CacheView &k = forward_.k, &v = forward_.v;
    constexpr int64_t kSize = sizeof(typename Format::Bits);
    bool finite = true;
    for (int64_t i = 0; i < tile_size_; ++i) {
      const int64_t row = int64_t{block_.sequence->key_row} + tile_first_ + i;
      finite &= LoadRow<Format>(k.data + (row * k.stride_token + kv_head_ * k.stride_head) * kSize,
                                k.stride_dim, head_size_, scratch_.keys + i * kStride);
      finite &= LoadRow<Format>(v.data + (row * v.stride_token + kv_head_ * v.stride_head) * kSize,
                                v.stride_dim, v_head_size_, scratch_.values + i * kStride);
    }
    for (int64_t i = tile_size_; i % kScoreKeys != 0; ++i) {
      __builtin_memset(scratch_.keys + i * kStride, 0, head_size_ * sizeof(float));
      __builtin_memset(scratch_.values + i * kStride, 0, v_head_size_ * sizeof(float));
    }
    return finite;
  }

  // The place of a position in the tile, or of the tile's end that is next to it.
  int32_t IndexOf(int32_t position) const {
    return static_cast<int32_t>(
        Min<int64_t>(Max<int64_t>(int64_t{position} - tile_first_, 0), tile_size_));
  }

  void AddPanel(int64_t panel, bool finite) {
    const int64_t row = panel * kPanelRows;
    const int64_t rows = Min<int64_t>(num_rows_ - row, kPanelRows);
    // Both ends of a row's visible keys grow with the row.
    const int64_t last = row + rows - 1;
    const int64_t first_key = IndexOf(scratch_.visible_begin[row]);
    const int64_t behind = IndexOf(scratch_.visible_end[last]);
    if (first_key >= behind) return;
    const int64_t begin = first_key / kScoreKeys * kScoreKeys;
    const int64_t end = (behind + kScoreKeys - 1) / kScoreKeys * kScoreKeys;
    const bool masked =
        IndexOf(scratch_.visible_begin[last]) > begin || IndexOf(scratch_.visible_end[row]) < end;
    if (masked) {
      for (int64_t i = 0; i < NumLanes(rows); ++i) {
        scratch_.tile_begin[i] = IndexOf(scratch_.visible_begin[row + i]);
        scratch_.tile_end[i] = IndexOf(scratch_.visible_end[row + i]);
      }
    }
    switch (NumLanes(rows) / kWidth) {
      case 1:
        Weigh<1>(row, begin, end, masked);
        break;
      case 2:
        Weigh<2>(row, begin, end, masked);
        break;
      default:
        Weigh<kPanelVectors>(row, begin, end, masked);
    }
    if (masked && !(finite && scratch_.finite[panel])) {
      AddRowByRow(row, rows);
    } else {
      AddProducts(row, rows, begin, end);
    }
  }

  // Weights, and gradients of the scores, for keys [begin, end) of the tile and kVectors vectors of
  // rows; 0 where a row does not see a key.
  template <int kVectors>
  void Weigh(int64_t row, int64_t begin, int64_t end, bool masked) {
    auto nothing = [] {};
    ScorePanel<kStride, kVectors>(scratch_.keys, scratch_.query_panels + row * head_size_,
                                  head_size_, begin, end, scratch_.weights, nothing);
    ScorePanel<kStride, kVectors>(scratch_.values, scratch_.grad_out_panels + row * v_head_size_,
                                  v_head_size_, begin, end, scratch_.grad_scores, nothing);
    for (int v = 0; v < kVectors; ++v) {
      if (softcap_ > 0.0f || alibi_ || masked) {
        WeighVector<true>(row, v * kWidth, begin, end, masked);
      } else {
        WeighVector<false>(row, v * kWidth, begin, end, masked);
      }
    }
  }

  template <bool kAdjust>
  void WeighVector(int64_t row, int64_t lane, int64_t begin, int64_t end, bool masked) {
    const Float lse = Load(scratch_.lse + row + lane), delta = Load(scratch_.delta + row + lane);
    const Float slope = Load(scratch_.slope + row + lane);
    const Int diagonal = Load(scratch_.diagonal + row + lane);
    const Int first = Load(scratch_.tile_begin + lane), behind = Load(scratch_.tile_end + lane);
    const float cap = softcap_ * kLog2e;
    for (int64_t key = begin; key < end; ++key) {
      float* const weights = scratch_.weights[key] + lane;
      float* const grad_scores = scratch_.grad_scores[key] + lane;
      Float score = Load(weights), factor = Splat(1.0f);
      if (kAdjust && softcap_ > 0.0f) {
        const Float capped = Tanh(score);
        score = capped * cap;
        factor = 1.0f - capped * capped;
      }
      if (kAdjust && alibi_) {
        // Unsigned, so that an overflow is defined.
        const Int distance = (Int)((Uint)diagonal - static_cast<uint32_t>(tile_first_ + key));
        score -= slope * Abs(__builtin_convertvector(distance, Float));
      }
      // Above 0 by rounding alone, or for an LSE of other scores: Exp2 ends at 2^128.
      Float exponent = score - lse;
      exponent = exponent > 127.0f ? Splat(127.0f) : exponent;
      Float weight = Exp2(exponent);
      Float grad_score = weight * (Load(grad_scores) - delta);
      if (kAdjust) {
        grad_score *= factor;
        if (masked) {
          const Int index = SplatInt(static_cast<int32_t>(key));
          weight = index >= first ? weight : Float{};
          weight = index < behind ? weight : Float{};
          grad_score = index >= first ? grad_score : Float{};
          grad_score = index < behind ? grad_score : Float{};
        }
      }
      Store(weights, weight);
      Store(grad_scores, grad_score);
    }
  }

  float* KeySums(int64_t key) const { return sums_.keys + SumRow(key) * sums_.key_stride; }
  float* ValueSums(int64_t key) const { return sums_.values + SumRow(key) * sums_.value_stride; }
  int64_t SumRow(int64_t key) const {
    return int64_t{block_.sequence->key_row} + tile_first_ + key - sums_.first_row;
  }

  void AddProducts(int64_t row, int64_t rows, int64_t begin, int64_t end) {
    const float* grad_out = scratch_.grad_out + row * v_stride_;
    for (int64_t d = 0; d < v_head_size_; d += kValueBlock) {
      for (int64_t key = begin; key < end; key += kScoreKeys) {
        AddProduct<kScoreKeys, kPanelRows, 1>(scratch_.weights[key], grad_out + d, v_stride_, rows,
                                              ValueSums(key) + d, sums_.value_stride, Whole());
      }
    }
    const float* queries = scratch_.queries + row * stride_;
    float* const grad_q = scratch_.grad_q + row * stride_;
    for (int64_t d = 0; d < head_size_; d += kValueBlock) {
      for (int64_t key = begin; key < end; key += kScoreKeys) {
        AddProduct<kScoreKeys, kPanelRows, 1>(scratch_.grad_scores[key], queries + d, stride_, rows,
                                              KeySums(key) + d, sums_.key_stride, Whole());
      }
      int64_t i = 0;
      for (; i + kValueRows <= rows; i += kValueRows) {
        AddGradQ<kValueRows>(i, begin, end, d, grad_q);
      }
      for (; i < rows; i += kFewValueRows) AddGradQ<kFewValueRows>(i, begin, end, d, grad_q);
    }
  }

  // Of kRows rows of a panel and keys [begin, end), kValueBlock elements from d on.
  template <int kRows>
  void AddGradQ(int64_t row, int64_t begin, int64_t end, int64_t d, float* grad_q) const {
    AddProduct<kRows, 1, kPanelRows>(scratch_.grad_scores[begin] + row,
                                     scratch_.keys + begin * kStride + d, kStride, end - begin,
                                     grad_q + row * stride_ + d, stride_, Whole());
  }

  // 0 times infinity or NaN would be NaN: adds exactly what the rows see.
  void AddRowByRow(int64_t row, int64_t rows) {
    for (int64_t i = 0; i < rows; ++i) {
      const float* q = scratch_.queries + (row + i) * stride_;
      const float* grad_out = scratch_.grad_out + (row + i) * v_stride_;
      float* const grad_q = scratch_.grad_q + (row + i) * stride_;
      for (int64_t key = scratch_.tile_begin[i]; key < scratch_.tile_end[i]; ++key) {
        const float weight = scratch_.weights[key][i], grad_score = scratch_.grad_scores[key][i];
        const float* k = scratch_.keys + key * kStride;
        float *const key_sums = KeySums(key), *const value_sums = ValueSums(key);
        for (int64_t d = 0; d < v_head_size_; ++d) value_sums[d] += weight * grad_out[d];
        for (int64_t d = 0; d < head_size_; ++d) key_sums[d] += grad_score * q[d];
        for (int64_t d = 0; d < head_size_; ++d) grad_q[d] += grad_score * k[d];
      }
    }
  }

  const AttentionBackwardProblem& problem_;
  const AttentionProblem& forward_;
  const BackwardBlock& block_;
  const KeyGradients& sums_;
  BackwardScratch& scratch_;
  double* const grad_sinks_;
  const int64_t kv_head_;
  int64_t head_size_, v_head_size_, stride_, v_stride_, num_rows_, num_panels_;
  int32_t tile_first_ = 0, tile_size_ = 0;  // position of the tile's first key
  float softcap_;
  bool alibi_;
};

void RunBackward(const AttentionBackwardProblem& problem, const BackwardBlock& block,
                 int64_t kv_head, const KeyGradients& sums, double* grad_sinks, void* scratch) {
  WithFormat(problem.args->k.dtype, [&](auto format) {
    using Format = decltype(format);
    if constexpr (sizeof(typename Format::Bits) == 1) {
      return;  // fp8 is refused before
    } else if (LargerHeadSize(problem.forward) <= kUsualDims) {
      TileBackward<kUsualDims>(problem, block, kv_head, sums, grad_sinks, scratch)
          .template Run<Format>();
    } else {
      TileBackward<kMaxHeadSize>(problem, block, kv_head, sums, grad_sinks, scratch)
          .template Run<Format>();
    }
  });
}

constexpr AttentionBackwardEngine kBackward = {"tiles",     "tiles of queries and keys",
                                               RunBackward, BackwardScratchBytes,
                                               MaxTileRows, kPanelRows};

}  // namespace
}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CPU_ATTENTION_BACKWARD_TILES_H_
