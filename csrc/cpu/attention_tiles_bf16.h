// Products of tiles in bfloat16: queries, keys and values have such numbers, and weights are
// rounded to them. The sums are floats.
#ifndef FLASHXLA_CSRC_CPU_ATTENTION_TILES_BF16_H_
#define FLASHXLA_CSRC_CPU_ATTENTION_TILES_BF16_H_

#include "cpu/attention_tiles.h"
#include "cpu/bf16_pairs.h"

namespace flashxla {
namespace {

// A tile's keys are [key][pair of dims], its values [pair of keys][dim], a panel's queries [pair of
// dims][row] and its weights [pair of keys][row], in every other row of the scores they are made
// of. They take the places of the float products' arrays, and no more room.
template <int kMaxDims>
class Bf16Products {
 public:
  static constexpr int kStride = kTileStride<kMaxDims>;
  static constexpr int kTogether = 2;

  Bf16Products(const AttentionProblem& problem, const TileScratch& scratch, float factor)
      : problem_(problem),
        scratch_(scratch),
        head_pairs_((problem.head_size + 1) / 2),
        padded_v_head_size_(PaddedHeadSize(problem.v_head_size)),
        factor_(factor) {}

  void LoadQueries(const char* const* rows, int64_t row) {
    float pairs[kWidth][kRowSize / 2];
    WithFormat(problem_.q.dtype, [&](auto format) {
      using Format = decltype(format);
      if constexpr (kFitsBf16<Format>) {
        for (int i = 0; i < kWidth; ++i) {
          LoadBf16Row<Format>(rows[i], problem_.q.stride_dim, problem_.head_size,
                              reinterpret_cast<uint16_t*>(pairs[i]));
        }
      }
    });
    StoreLanes(pairs[0], kRowSize / 2, head_pairs_, PanelOf(row) + row % kPanelRows);
  }

  template <typename Format>
  bool LoadTile(const KeyList& list) {
    for (int64_t i = 0; i < list.size; ++i) {
      uint16_t* key = reinterpret_cast<uint16_t*>(scratch_.keys + i * kStride);
      LoadBf16Row<Format>(list.key[i], problem_.k.stride_dim, problem_.head_size, key);
    }
    for (int64_t i = list.size; i % kScoreKeys != 0; ++i) {
      __builtin_memset(scratch_.keys + i * kStride, 0, head_pairs_ * sizeof(float));
    }
    bool finite = true;
    uint16_t rows[2][kRowSize] = {};
    for (int64_t i = 0; i < list.size; i += 2) {
      for (int64_t j = 0; j < 2; ++j) {
        if (i + j < list.size) {
          finite &= LoadBf16Row<Format>(list.value[i + j], problem_.v.stride_dim,
                                        problem_.v_head_size, rows[j]);
        } else {
          __builtin_memset(rows[j], 0, sizeof(rows[j]));
        }
      }
      for (int64_t d = 0; d < padded_v_head_size_; d += kWidth) {
        StorePairs(scratch_.values + i / 2 * kStride + d,
                   Pair(LoadHalves(rows[0] + d), LoadHalves(rows[1] + d)));
      }
    }
    return finite;
  }

  template <int kVectors>
  void Score(int64_t key, int64_t row, float (*scores)[kPanelRows]) const {
    const float* keys = scratch_.keys + key * kStride;
    const float* queries = PanelOf(row) + row % kPanelRows;
    Float c[kScoreKeys][kVectors] = {};
    for (int64_t pair = 0; pair < head_pairs_; ++pair, ++keys, queries += kPanelRows) {
      Pairs lanes[kVectors];
      for (int v = 0; v < kVectors; ++v) lanes[v] = LoadPairs(queries + v * kWidth);
#pragma GCC unroll 16
      for (int m = 0; m < kScoreKeys; ++m) {
        const Pairs k = SplatPair(keys + m * kStride);
        for (int v = 0; v < kVectors; ++v) c[m][v] = AddProducts(c[m][v], k, lanes[v]);
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < kScoreKeys; ++m) {
      for (int v = 0; v < kVectors; ++v) Store(scores[m] + v * kWidth, c[m][v] * factor_);
    }
  }

  static void StoreWeights(const Float* weights, float* dst) {
    StorePairs(dst, Pair(Round(weights[0]), Round(weights[1])));
  }

  template <int kRows>
  void AddRows(const float* weights, const float* rescale, int64_t begin, int64_t end, int64_t d,
               float* out) const {
    const float* values = scratch_.values + begin / 2 * kStride + d;
    weights += begin / 2 * 2 * kPanelRows;
    out += d;
    Float c[kRows][kValueVectors];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      for (int v = 0; v < kValueVectors; ++v) {
        c[m][v] = rescale[m] * Load(out + m * padded_v_head_size_ + v * kWidth);
      }
    }
    for (int64_t key = begin / 2 * 2; key < end;
         key += 2, weights += 2 * kPanelRows, values += kStride) {
      Pairs lanes[kValueVectors];
      for (int v = 0; v < kValueVectors; ++v) lanes[v] = LoadPairs(values + v * kWidth);
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        const Pairs weight = SplatPair(weights + m);
        for (int v = 0; v < kValueVectors; ++v) c[m][v] = AddProducts(c[m][v], weight, lanes[v]);
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      for (int v = 0; v < kValueVectors; ++v) {
        Store(out + m * padded_v_head_size_ + v * kWidth, c[m][v]);
      }
    }
  }

  // In the same pairs, with zeros in place of the other keys' values.
  void AddRowAlone(const float* weights, const float* rescale, int64_t begin, int64_t end,
                   int64_t d, float* out) const {
    for (int64_t i = d; i < d + kValueBlock; i += kWidth) {
      Float sum = *rescale * Load(out + i);
      for (int64_t key = begin / 2 * 2; begin < end && key < end; key += 2) {
        Pairs value = LoadPairs(scratch_.values + key / 2 * kStride + i);
        if (key < begin) value = WithoutFirst(value);
        if (key + 1 == end) value = WithoutSecond(value);
        sum = AddProducts(sum, SplatPair(weights + key * kPanelRows), value);
      }
      Store(out + i, sum);
    }
  }

 private:
  static constexpr int64_t kRowSize = kMaxHeadSize + kWidth;
  static_assert(kMaxValueHeadSize <= kMaxHeadSize);

  float* PanelOf(int64_t row) const {
    return scratch_.queries + row / kPanelRows * kPanelRows * problem_.head_size;
  }

  const AttentionProblem& problem_;
  const TileScratch& scratch_;
  const int64_t head_pairs_, padded_v_head_size_;
  const float factor_;
};

inline void AttendTilesBf16(const AttentionProblem& problem, const AttentionTask& task,
                            void* scratch) {
  WithFormat(problem.args->kv_dtype, [&](auto format) {
    using Format = decltype(format);
    if constexpr (kFitsBf16<Format>) {
      if (LargerHeadSize(problem) <= kUsualDims) {
        TileAttention<Bf16Products<kUsualDims>>(problem, task, scratch).template Run<Format>();
      } else {
        TileAttention<Bf16Products<kMaxHeadSize>>(problem, task, scratch).template Run<Format>();
      }
    }
  });
}

}  // namespace
}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CPU_ATTENTION_TILES_BF16_H_
