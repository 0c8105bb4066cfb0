// Products of small matrices in registers, with which attention's tiles are computed, forward and
// backward: C[m][lane] += a[m][k] * B[k][lane]; each element of a is broadcast.
//
// A panel is kPanelRows rows of queries (or of their gradients), transposed: one row per vector
// lane. Its products with keys come out as [key][row].
#ifndef FLASHXLA_CSRC_CPU_ATTENTION_PRODUCTS_H_
#define FLASHXLA_CSRC_CPU_ATTENTION_PRODUCTS_H_

#include "common/attention_arguments.h"
#include "cpu/attention_problem.h"
#include "cpu/simd.h"

namespace flashxla {
namespace {

constexpr int kPanelVectors = 3;
constexpr int kPanelRows = kPanelVectors * kWidth;
constexpr int kTileKeys = KeyList::kMaxKeys;

// Register blocks: keys x panel vectors for scores, rows x value vectors for values.
constexpr int kScoreKeys = kWidth == 16 ? 8 : 4;
constexpr int kValueRows = kWidth == 16 ? 12 : 6;
constexpr int kFewValueRows = kWidth == 16 ? 4 : 2;  // for the last rows of a panel
constexpr int kValueVectors = 2;
constexpr int kValueBlock = kValueVectors * kWidth;
static_assert(kPanelRows % kValueRows == 0 && kTileKeys % kScoreKeys == 0);
// No register block reads weights that were not computed.
static_assert(kWidth % kFewValueRows == 0 && kValueRows % kFewValueRows == 0);

// Distance between the rows of a tile: an odd number of cache lines, so that rows do not map to the
// same cache sets, and a constant, so that the inner loops need no address arithmetic.
template <int kMaxDims>
constexpr int kTileStride = kMaxDims + 16;
constexpr int kUsualDims = 256;
static_assert(kUsualDims % kValueBlock == 0 && kMaxValueHeadSize % kValueBlock == 0 &&
              kMaxHeadSize % kValueBlock == 0);

constexpr int kMaxPanels = 8;
constexpr int kMaxRows = kMaxPanels * kPanelRows;

int64_t LargerHeadSize(const AttentionProblem& problem) {
  return Max(problem.head_size, problem.v_head_size);
}

// As many rows as fit in the L2 cache beside a tile of keys and values.
int64_t MaxTileRows(const AttentionProblem& problem) {
  const int64_t head_size = LargerHeadSize(problem);
  return head_size <= 128 ? kMaxRows : head_size <= kUsualDims ? kMaxRows / 2 : kMaxRows / 4;
}

// Loads a strided row as float. Returns whether all elements are finite.
template <typename Format>
bool LoadRow(const char* bytes, int64_t stride, int64_t n, float* dst) {
  const auto* src = reinterpret_cast<const typename Format::Bits*>(bytes);
  int64_t i = 0;
  uint32_t largest = 0;
  if (stride == 1) {
    Int magnitudes = {};
    for (; i + kWidth <= n; i += kWidth) {
      const Float x = LoadAs<Format>(src + i);
      const Int magnitude = (Int)x & 0x7fffffff;
      magnitudes = magnitude > magnitudes ? magnitude : magnitudes;
      Store(dst + i, x);
    }
    const Int special = magnitudes >= 0x7f800000;
    for (int lane = 0; lane < kWidth; ++lane) largest |= static_cast<uint32_t>(special[lane]);
    if (largest != 0) largest = 0x7f800000;
  }
  for (; i < n; ++i) {
    dst[i] = Format::Decode(src[i * stride]);
    largest = Max(largest, BitsOf(dst[i]) & 0x7fffffff);
  }
  return largest < 0x7f800000;
}

// Of whole vectors of rows.
constexpr int64_t NumLanes(int64_t rows) { return (rows + kWidth - 1) / kWidth * kWidth; }

// Writes kWidth rows of n elements as lanes of a panel.
inline void StoreLanes(const float* rows, int64_t stride, int64_t n, float* panel) {
  int64_t d = 0;
  for (; d + kWidth <= n; d += kWidth) {
    Float x[kWidth];
    for (int i = 0; i < kWidth; ++i) x[i] = Load(rows + i * stride + d);
    Transpose(x);
    for (int i = 0; i < kWidth; ++i) Store(panel + (d + i) * kPanelRows, x[i]);
  }
  for (; d < n; ++d) {  // copied as bytes: they may be pairs of bfloat16
    for (int i = 0; i < kWidth; ++i) {
      __builtin_memcpy(panel + d * kPanelRows + i, rows + i * stride + d, sizeof(float));
    }
  }
}

// scores[m][row] = dot(keys[m], queries[.][row]) for kScoreKeys keys and kVectors vectors of rows.
template <int kStride, int kVectors>
inline void ScoreBlock(const float* keys, const float* queries, int64_t head_size,
                       float (*scores)[kPanelRows]) {
  // The block fills AVX2's 16 registers, which GCC allocates without a spill. For Clang the last of
  // the lanes stays in memory.
#if defined(__clang__) && defined(FLASHXLA_X86)
  constexpr int kHeld = kScoreKeys * kVectors + kVectors + 1 == 16 ? kVectors - 1 : kVectors;
#else
  constexpr int kHeld = kVectors;
#endif
  Float c[kScoreKeys][kVectors] = {};
  for (int64_t d = 0; d < head_size; ++d, ++keys, queries += kPanelRows) {
    Float lanes[kHeld];
    for (int v = 0; v < kHeld; ++v) lanes[v] = Load(queries + v * kWidth);
#pragma GCC unroll 16
    for (int m = 0; m < kScoreKeys; ++m) {
      for (int v = kHeld; v < kVectors; ++v) {
        const float* again = queries + v * kWidth;
        asm volatile("" : "+r"(again));  // not known to be what the last key loaded
        c[m][v] += keys[m * kStride] * Load(again);
      }
      for (int v = 0; v < kHeld; ++v) c[m][v] += keys[m * kStride] * lanes[v];
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kScoreKeys; ++m) {
    for (int v = 0; v < kVectors; ++v) Store(scores[m] + v * kWidth, c[m][v]);
  }
}

// The same for keys [begin, end), multiples of kScoreKeys. before_block() is called before every
// kScoreKeys keys.
template <int kStride, int kVectors, typename Function>
void ScorePanel(const float* keys, const float* queries, int64_t head_size, int64_t begin,
                int64_t end, float (*weights)[kPanelRows], Function&& before_block) {
  for (int64_t key = begin; key < end; key += kScoreKeys) {
    before_block();
    ScoreBlock<kStride, kVectors>(keys + key * kStride, queries, head_size, weights + key);
  }
}

// out[m] = factor(m) * out[m] + sum over k < count of a[m * kStrideM + k * kStrideK] * b[k], for
// kRows rows and kValueBlock elements of each.
template <int kRows, int kStrideM, int kStrideK, typename Factor>
inline void AddProduct(const float* a, const float* b, int64_t b_stride, int64_t count, float* out,
                       int64_t out_stride, Factor&& factor) {
  Float c[kRows][kValueVectors];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
    for (int v = 0; v < kValueVectors; ++v) {
      c[m][v] = factor(m) * Load(out + m * out_stride + v * kWidth);
    }
  }
  for (int64_t k = 0; k < count; ++k, a += kStrideK, b += b_stride) {
    Float lanes[kValueVectors];
    for (int v = 0; v < kValueVectors; ++v) lanes[v] = Load(b + v * kWidth);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      for (int v = 0; v < kValueVectors; ++v) c[m][v] += a[m * kStrideM] * lanes[v];
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
    for (int v = 0; v < kValueVectors; ++v) Store(out + m * out_stride + v * kWidth, c[m][v]);
  }
}

}  // namespace
}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CPU_ATTENTION_PRODUCTS_H_
