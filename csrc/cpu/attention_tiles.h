// Attention for many rows: tiles of keys against panels of rows.
//
// A panel is kPanelRows rows of queries, one per vector lane, kept transposed. Scores come out as
// [key][row], so the softmax runs along rows without horizontal operations, and both products have
// the form C[m][lane] += a[m][k] * B[k][lane] with C in registers.
#ifndef FLASHXLA_CSRC_CPU_ATTENTION_TILES_H_
#define FLASHXLA_CSRC_CPU_ATTENTION_TILES_H_

#include "cpu/attention_engine.h"
#include "cpu/simd.h"

namespace flashxla {
namespace {

constexpr int kPanelVectors = 3;
constexpr int kPanelRows = kPanelVectors * kWidth;
constexpr int kMaxPanels = 8;
constexpr int kMaxRows = kMaxPanels * kPanelRows;
constexpr int kTileKeys = KeyList::kMaxKeys;

// The register blocks: keys x panel vectors for scores, rows x value vectors for values.
constexpr int kScoreKeys = kWidth == 16 ? 8 : 4;
constexpr int kValueRows = kWidth == 16 ? 12 : 6;
constexpr int kFewValueRows = kWidth == 16 ? 4 : 2;  // for what is left of a panel
constexpr int kValueVectors = 2;
constexpr int kValueBlock = kValueVectors * kWidth;
static_assert(kPanelRows % kValueRows == 0 && kTileKeys % kScoreKeys == 0);
// No block reaches into vectors of rows whose weights are not computed.
static_assert(kWidth % kFewValueRows == 0 && kValueRows % kFewValueRows == 0);

// Tile rows are this far apart: an odd number of cache lines, so that they do not collide in the
// cache, and a constant, so that the inner loops need no address arithmetic.
constexpr int kTileStride = 256 + 16;
static_assert(256 % kValueBlock == 0);

// As many rows as leave room for the tiles in the second-level cache.
int64_t MaxTileRows(int64_t head_size) { return head_size <= 128 ? kMaxRows : kMaxRows / 2; }

// Where attend_tiles works; see TileScratch::Bytes.
struct TileScratch {
  float* keys;                           // [kTileKeys][kTileStride]
  float* values;                         // [kTileKeys][kTileStride]
  float* queries;                        // per panel [head_size][kPanelRows]
  float* out;                            // per row [padded head size]
  float weights[kTileKeys][kPanelRows];  // scores, then 2^(score - top)
  float top[kMaxRows], sum[kMaxRows], slope[kMaxRows];
  int32_t diagonal[kMaxRows];
  int32_t visible_begin[kMaxRows], visible_end[kMaxRows];  // positions
  float decay[kPanelRows];                                 // of what came before this tile
  int32_t tile_begin[kPanelRows], tile_end[kPanelRows];    // visible keys, as indices of the list

  static int64_t PaddedHeadSize(int64_t head_size) {
    return (head_size + kValueBlock - 1) / kValueBlock * kValueBlock;
  }
  static int64_t Bytes(int64_t head_size) {
    return static_cast<int64_t>(sizeof(TileScratch)) + 64 +
           4 * (2 * kTileKeys * kTileStride +
                MaxTileRows(head_size) * (head_size + PaddedHeadSize(head_size)));
  }
};

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

// Fetches the next tile's rows little by little, while the arithmetic of this one goes on.
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

// weights[key][row] = dot(keys[key], queries[.][row]) for keys [begin, end), both multiples of
// kScoreKeys, and the first kVectors vectors of rows.
template <int kVectors>
void ScorePanel(const float* keys, const float* queries, int64_t head_size, int64_t begin,
                int64_t end, float (*weights)[kPanelRows], Prefetcher* prefetcher) {
  for (int64_t key = begin; key < end; key += kScoreKeys) {
    prefetcher->Step();
    const float* a = keys + key * kTileStride;
    const float* b = queries;
    Float c[kScoreKeys][kVectors] = {};
    for (int64_t d = 0; d < head_size; ++d, ++a, b += kPanelRows) {
      Float lanes[kVectors];
      for (int v = 0; v < kVectors; ++v) lanes[v] = Load(b + v * kWidth);
#pragma GCC unroll 16
      for (int m = 0; m < kScoreKeys; ++m) {
        for (int v = 0; v < kVectors; ++v) c[m][v] += a[m * kTileStride] * lanes[v];
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < kScoreKeys; ++m) {
      for (int v = 0; v < kVectors; ++v) Store(weights[key + m] + v * kWidth, c[m][v]);
    }
  }
}

// out[row] = decay[row] * out[row] + sum over keys [begin, end) of weights[key][row] * values[key],
// for kRows rows and kValueBlock elements.
template <int kRows>
void AddValues(const float* values, const float* weights, const float* decay, int64_t begin,
               int64_t end, float* out, int64_t out_stride) {
  Float c[kRows][kValueVectors];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
    for (int v = 0; v < kValueVectors; ++v) {
      c[m][v] = decay[m] * Load(out + m * out_stride + v * kWidth);
    }
  }
  const float* a = weights + begin * kPanelRows;
  const float* b = values + begin * kTileStride;
  for (int64_t key = begin; key < end; ++key, a += kPanelRows, b += kTileStride) {
    Float lanes[kValueVectors];
    for (int v = 0; v < kValueVectors; ++v) lanes[v] = Load(b + v * kWidth);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      for (int v = 0; v < kValueVectors; ++v) c[m][v] += a[m] * lanes[v];
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
    for (int v = 0; v < kValueVectors; ++v) Store(out + m * out_stride + v * kWidth, c[m][v]);
  }
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

class TileAttention {
 public:
  TileAttention(const AttentionProblem& problem, const AttentionTask& task, void* memory)
      : problem_(problem), task_(task), scratch_(*static_cast<TileScratch*>(memory)) {
    head_size_ = problem.head_size;
    padded_head_size_ = TileScratch::PaddedHeadSize(head_size_);
    num_rows_ = task.row_end - task.row_begin;
    num_panels_ = (num_rows_ + kPanelRows - 1) / kPanelRows;
    float* p =
        reinterpret_cast<float*>(static_cast<char*>(memory) + (sizeof(TileScratch) + 63) / 64 * 64);
    scratch_.keys = p, p += kTileKeys * kTileStride;
    scratch_.values = p, p += kTileKeys * kTileStride;
    scratch_.out = p, p += MaxTileRows(head_size_) * padded_head_size_;
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
                        scratch_.keys + i * kTileStride);
        finite &= LoadRow<Format>(now->value[i], problem_.v.stride_dim, head_size_,
                                  scratch_.values + i * kTileStride);
      }
      // The keys that fill up the last block: of no account, but garbage may be slow to compute
      // with.
      for (int64_t i = now->size; i % kScoreKeys != 0; ++i) {
        __builtin_memset(scratch_.keys + i * kTileStride, 0, head_size_ * sizeof(float));
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
                scratch_.out + row * padded_head_size_, {scratch_.top[row], scratch_.sum[row]});
    }
  }

 private:
  // Lists the keys of the next tile; none when all are done.
  void ListTile(int64_t* position, KeyList* list) const {
    list->size = 0;
    while (list->size == 0 && *position < task_.key_end) {
      problem_.ListKeys(*task_.sequence, task_.kv_head_begin, position, task_.key_end, kTileKeys,
                        list);
    }
  }

  void LoadQueries() {
    const Sequence& sequence = *task_.sequence;
    const float scale = problem_.ScoreScale(sequence, task_.kv_head_begin);
    // Scores are in base 2, or in units of the softcap.
    const float factor = softcap_ > 0.0f ? scale / softcap_ : scale * kLog2E;
    float* row_values = scratch_.keys;
    for (int64_t row = 0; row < num_panels_ * kPanelRows; ++row) {
      float* lane =
          scratch_.queries + row / kPanelRows * kPanelRows * head_size_ + row % kPanelRows;
      // Rows beyond the last one see what it sees, and are computed but not stored.
      const int64_t real_row = task_.row_begin + Min(row, num_rows_ - 1);
      const int64_t i = real_row / problem_.group_size;
      const int64_t head =
          task_.kv_head_begin * problem_.group_size + real_row % problem_.group_size;
      LoadQuery(problem_, task_, task_.kv_head_begin, real_row, row_values);
      for (int64_t d = 0; d < head_size_; ++d) lane[d * kPanelRows] = row_values[d] * factor;
      const KeyRange range = problem_.Visible(sequence, i);
      scratch_.visible_begin[row] = static_cast<int32_t>(Min(range.begin, sequence.num_keys));
      scratch_.visible_end[row] = static_cast<int32_t>(Max<int64_t>(range.end, 0));
      scratch_.diagonal[row] = static_cast<int32_t>(i + sequence.length - sequence.num_queries);
      scratch_.slope[row] = alibi_ ? problem_.AlibiSlope(sequence, head) * kLog2E : 0.0f;
      scratch_.top[row] = -kInfinity;
      scratch_.sum[row] = 0.0f;
    }
    __builtin_memset(scratch_.out, 0, num_panels_ * kPanelRows * padded_head_size_ * sizeof(float));
    // What lies behind the head size takes part in the products and is not stored, but must not
    // slow them down with denormal numbers.
    for (int64_t i = 0; head_size_ != padded_head_size_ && i < kTileKeys; ++i) {
      __builtin_memset(scratch_.values + i * kTileStride + head_size_, 0,
                       (padded_head_size_ - head_size_) * sizeof(float));
    }
  }

  void AttendPanel(const KeyList& list, int64_t panel, bool finite) {
    const int64_t row = panel * kPanelRows;
    const int64_t rows = Min<int64_t>(num_rows_ - row, kPanelRows);
    // Both ends of what a row can see grow with the row.
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
        WeighKeys<1>(list, row, begin, end, masked);
        break;
      case 2:
        WeighKeys<2>(list, row, begin, end, masked);
        break;
      default:
        WeighKeys<kPanelVectors>(list, row, begin, end, masked);
    }
    float* out = scratch_.out + row * padded_head_size_;
    for (int64_t d = 0; d < head_size_; d += kValueBlock) {
      if (masked && !finite) {
        // A weight of zero must not meet a value that is not finite: exact ranges, row by row.
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
    AddValues<kRows>(scratch_.values + d, scratch_.weights[0] + row, scratch_.decay + row, begin,
                     end, out + row * padded_head_size_ + d, padded_head_size_);
  }

  // Computes the weights of keys [begin, end) of the list for kVectors vectors of rows, and updates
  // the rows' state.
  template <int kVectors>
  void WeighKeys(const KeyList& list, int64_t row, int64_t begin, int64_t end, bool masked) {
    ScorePanel<kVectors>(scratch_.keys, scratch_.queries + row * head_size_, head_size_,
                         begin / kScoreKeys * kScoreKeys,
                         (end + kScoreKeys - 1) / kScoreKeys * kScoreKeys, scratch_.weights,
                         &prefetcher_);
    if (softcap_ > 0.0f || alibi_ || masked) {
      for (int v = 0; v < kVectors; ++v) AdjustScores(list, row, v * kWidth, begin, end, masked);
    }
    Float top[kVectors], base[kVectors], sum[kVectors] = {};
    for (int v = 0; v < kVectors; ++v) top[v] = Load(scratch_.top + row + v * kWidth);
    for (int64_t key = begin; key < end; ++key) {
      for (int v = 0; v < kVectors; ++v) {
        const Float score = Load(scratch_.weights[key] + v * kWidth);
        top[v] = score > top[v] ? score : top[v];
      }
    }
    for (int v = 0; v < kVectors; ++v) base[v] = top[v] == -kInfinity ? Float{} : top[v];
    for (int64_t key = begin; key < end; ++key) {
      for (int v = 0; v < kVectors; ++v) {
        float* p = scratch_.weights[key] + v * kWidth;
        const Float weight = Exp2(Load(p) - base[v]);
        sum[v] += weight;
        Store(p, weight);
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      const int64_t i = row + v * kWidth;
      const Float decay = Exp2(Load(scratch_.top + i) - base[v]);
      Store(scratch_.decay + v * kWidth, decay);
      Store(scratch_.sum + i, Load(scratch_.sum + i) * decay + sum[v]);
      Store(scratch_.top + i, top[v]);
    }
  }

  // Applies softcap, ALiBi and mask to one vector of rows.
  void AdjustScores(const KeyList& list, int64_t row, int64_t lane, int64_t begin, int64_t end,
                    bool masked) {
    const Float slope = Load(scratch_.slope + row + lane);
    const Int diagonal = Load(scratch_.diagonal + row + lane);
    const Int first = Load(scratch_.tile_begin + lane), behind = Load(scratch_.tile_end + lane);
    const float cap = softcap_ * kLog2E;
    for (int64_t key = begin; key < end; ++key) {
      float* p = scratch_.weights[key] + lane;
      Float score = Load(p);
      if (softcap_ > 0.0f) score = Tanh(score) * cap;
      if (alibi_) {
        // Unsigned: rows behind the last hold anything.
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
  int64_t head_size_, padded_head_size_, num_rows_, num_panels_;
  float softcap_;
  bool alibi_;
  Prefetcher prefetcher_;
};

void AttendTiles(const AttentionProblem& problem, const AttentionTask& task, void* scratch) {
  WithFormat(problem.args->kv_dtype,
             [&](auto format) { TileAttention(problem, task, scratch).Run<decltype(format)>(); });
}

}  // namespace
}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CPU_ATTENTION_TILES_H_
