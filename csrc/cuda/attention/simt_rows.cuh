// Attention of one warp on CUDA cores: up to 16 rows times 8 keys at a time, with an online softmax
// in float32. Exact to float32: nothing is rounded to fewer bits.
//
// Each lane has some dims of all rows and keys. It multiplies them and adds them up, and an
// exchange among the lanes makes a score out of each 32 sums: lane l gets that of row l / 8 (of a
// quad, i.e. four rows) and key l % 8. The weights go back to all lanes through shared memory.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_SIMT_ROWS_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_SIMT_ROWS_CUH_

#include <type_traits>

#include "cuda/attention/key_loader.cuh"
#include "cuda/attention/simt_item.cuh"
#include "cuda/attention/split.cuh"

namespace flashxla::attention {

constexpr int kSimtRows = kSplitQTileRows;
constexpr int kSimtSliceKeys = 8;  // of a warp at a time
constexpr int kQuadRows = 4, kQuads = kSimtRows / kQuadRows;

// Loads 8 keys and their values into shared memory: rows of kDims elements, keys before values.
template <int kDims, bool kFp8>
struct SimtLoader {
  using Element = std::conditional_t<kFp8, uint8_t, float>;
  static constexpr int kElementSize = sizeof(Element);
  static constexpr int kRowBytes = kDims * kElementSize;
  static constexpr int kHalfBytes = kSimtSliceKeys * kRowBytes;
  static constexpr int kStageBytes = 2 * kHalfBytes;

  // Starts the copies of the 8 keys and values of one KV head that lanes [first, first + 8) have in
  // `places`; those that do not exist become zeros. All lanes of the warp must call this. It does
  // not write columns past head_size: the kernel zeroes them once.
  __device__ static void Start(const Problem& p, const KeyPlaces& places, int first, int kv_head,
                               char* stage) {
    const auto* k = reinterpret_cast<const Element*>(p.k.data) + kv_head * p.k.stride_head +
                    places.OffsetIn(p.k);
    const auto* v = reinterpret_cast<const Element*>(p.v.data) + kv_head * p.v.stride_head +
                    places.OffsetIn(p.v);
    if (!p.kv_vectors()) return StartElements(p, places.mask, first, k, v, stage);
    constexpr int kChunks = kRowBytes / 16, kAcross = kChunks < 32 ? kChunks : 32;
    constexpr int kRowsAtOnce = 32 / kAcross;
    const int lane = threadIdx.x & 31;
    const uint32_t to = SharedAddress(stage);
#pragma unroll
    for (int r = 0; r < kSimtSliceKeys; r += kRowsAtOnce) {
      const int row = r + lane / kAcross;
      const char* from_k = From(k, first + row);
      const char* from_v = From(v, first + row);
      const bool valid = (places.mask >> (first + row)) & 1;
#pragma unroll
      for (int c = 0; c < kChunks; c += kAcross) {
        const int offset = (c + lane % kAcross) * 16;
        if (offset < p.k.head_size * kElementSize) {
          CopyAsync16(to + row * kRowBytes + offset, from_k + offset, valid);
        }
        if (offset < p.v.head_size * kElementSize) {
          CopyAsync16(to + kHalfBytes + row * kRowBytes + offset, from_v + offset, valid);
        }
      }
    }
  }

 private:
  // The address that lane `lane` has.
  __device__ static const char* From(const Element* address, int lane) {
    return reinterpret_cast<const char*>(
        __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(address), lane));
  }

  // Any strides, alignment and head size.
  __device__ __noinline__ static void StartElements(const Problem& p, uint32_t mask, int first,
                                                    const Element* k, const Element* v,
                                                    char* stage) {
    auto* to = reinterpret_cast<Element*>(stage);
    for (int row = 0; row < kSimtSliceKeys; ++row, to += kDims) {
      const auto* from_k = reinterpret_cast<const Element*>(From(k, first + row));
      const auto* from_v = reinterpret_cast<const Element*>(From(v, first + row));
      const bool valid = (mask >> (first + row)) & 1;
      for (int d = threadIdx.x & 31; d < p.k.head_size; d += 32) {
        to[d] = valid ? from_k[d * p.k.stride_dim] : Element{0};
      }
      for (int d = threadIdx.x & 31; d < p.v.head_size; d += 32) {
        to[kSimtSliceKeys * kDims + d] = valid ? from_v[d * p.v.stride_dim] : Element{0};
      }
    }
  }
};

// What the warps of a block share.
template <int kDims, int kWarps>
struct alignas(16) SimtRowsShared {
  // Weights of a warp: [key][row]. Four floats more: neighbouring keys start in different banks.
  static constexpr int kWeightStride = kSimtRows + 4;
  float q[kSimtRows * kDims];  // later four rows of each warp's out
  float weights[kWarps][kSimtSliceKeys * kWeightStride];
  float row_max[kWarps][kSimtRows], row_sum[kWarps][kSimtRows];
  float factor[kSimtRows];  // of each row's sum of weighted values
  SimtRow rows[kSimtRows];
  SimtItem item;
  static_assert(kWarps * kQuadRows <= kSimtRows);
};

template <int kDims, int kWarps, bool kFp8>
struct SimtRows {
  using Loader = SimtLoader<kDims, kFp8>;
  using Shared = SimtRowsShared<kDims, kWarps>;
  // A lane has kPart dims of each 128 (or 64) dims.
  static constexpr int kParts = kDims > 128 ? 2 : 1, kPart = kDims / 32 / kParts;
  using Part = float[kPart];

  Part out[kSimtRows][kParts];             // not normalized yet
  float row_max[kQuads], row_sum[kQuads];  // of this lane's row: (log2); this lane's share

  // Starts a q tile: loads its queries. All threads of the block must call this; the tile before
  // must have been stored.
  __device__ void Begin(const Problem& p, const PlannedSequence& s, int index, int kv_head,
                        int first_row, Shared& shared) {
    const SimtItem item(p, s, index, kv_head, first_row, kSimtRows);
    if (threadIdx.x == 0) shared.item = item;
    LoadQueries<kDims, kDims>(p, item, (item.num_rows + kQuadRows - 1) / kQuadRows * kQuadRows,
                              shared.q);
    if (threadIdx.x < kSimtRows) shared.rows[threadIdx.x] = item.Row(p, threadIdx.x);
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) row_max[quad] = -INFINITY, row_sum[quad] = 0.f;
#pragma unroll
    for (int row = 0; row < kSimtRows; ++row) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int i = 0; i < kPart; ++i) out[row][part][i] = 0.f;
      }
    }
    __syncthreads();
  }

  // Processes keys [first, first + 8). `mask` says which of them exist. Lanes meet before and
  // after.
  __device__ void Step(const Problem& p, const char* keys, int first, uint32_t mask,
                       Shared& shared) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const SimtItem& item = shared.item;
    const int num_rows = item.num_rows;
    const bool e5m2 = p.kv_dtype == FLASHXLA_F8E5M2;
    float* weights = shared.weights[warp];
    Part x[kSimtSliceKeys];
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      if (quad * kQuadRows >= num_rows) break;
      float sum[kQuadRows * kSimtSliceKeys] = {};
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (kParts > 1 || quad == 0) Load(keys, part, e5m2, x);
#pragma unroll
        for (int r = 0; r < kQuadRows; ++r) {
          Part q;
          LoadFloats(shared.q + (quad * kQuadRows + r) * kDims + Dim(part), q);
#pragma unroll
          for (int key = 0; key < kSimtSliceKeys; ++key) {
#pragma unroll
            for (int i = 0; i < kPart; ++i) {
              sum[r * kSimtSliceKeys + key] = fmaf(q[i], x[key][i], sum[r * kSimtSliceKeys + key]);
            }
          }
        }
      }
      const int key = lane % kSimtSliceKeys;
      const bool exists = (mask >> key) & 1;
      const SimtRow row = shared.rows[quad * kQuadRows + lane / kSimtSliceKeys];
      const float score = item.Score(p, row, first + key, exists, AddUp(sum));
      const float weight = AddScore(score, quad);
      weights[key * Shared::kWeightStride + quad * kQuadRows + lane / kSimtSliceKeys] = weight;
    }
    __syncwarp();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      Load(keys + Loader::kHalfBytes, part, e5m2, x);
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        if (quad * kQuadRows >= num_rows) break;
#pragma unroll
        for (int key = 0; key < kSimtSliceKeys; ++key) {
          float weight[kQuadRows];
          LoadFloats(weights + key * Shared::kWeightStride + quad * kQuadRows, weight);
#pragma unroll
          for (int r = 0; r < kQuadRows; ++r) {
            if (weight[r] == 0.f) continue;  // the value may be NaN
            float* to = out[quad * kQuadRows + r][part];
#pragma unroll
            for (int i = 0; i < kPart; ++i) to[i] = fmaf(weight[r], x[key][i], to[i]);
          }
        }
      }
    }
  }

  // Combines the warps' parts of the q tile and stores it: the rows if `partial` is null, else a
  // partial result. All threads of the block must call this.
  __device__ void Store(const Problem& p, const PartialShape& shape, float* partial,
                        Shared& shared) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const SimtItem& item = shared.item;
    const int num_rows = item.num_rows;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      float total = row_sum[quad];
#pragma unroll
      for (int step = 1; step < kSimtSliceKeys; step *= 2) {
        total += __shfl_xor_sync(kAllLanes, total, step);
      }
      const int row = quad * kQuadRows + lane / kSimtSliceKeys;
      if (lane % kSimtSliceKeys == 0) {
        shared.row_max[warp][row] = row_max[quad], shared.row_sum[warp][row] = total;
      }
    }
    __syncthreads();  // from here on nobody needs the queries
    if (static_cast<int>(threadIdx.x) < num_rows) {
      StoreSums(p, shape, partial, static_cast<int>(threadIdx.x), shared);
    }
    float* exchange = shared.q;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      if (quad * kQuadRows >= num_rows) break;
      const float mine =
          exp2f(row_max[quad] -
                SoftmaxBase(LargestMax(quad * kQuadRows + lane / kSimtSliceKeys, shared)));
#pragma unroll
      for (int r = 0; r < kQuadRows; ++r) {
        const float factor = __shfl_sync(kAllLanes, mine, r * kSimtSliceKeys);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          float* to = exchange + (warp * kQuadRows + r) * kDims + Dim(part);
#pragma unroll
          for (int i = 0; i < kPart; ++i) to[i] = out[quad * kQuadRows + r][part][i] * factor;
        }
      }
      __syncthreads();
      for (int i = threadIdx.x; i < kQuadRows * kDims; i += 32 * kWarps) {
        const int row = quad * kQuadRows + i / kDims, d = i % kDims;
        if (row >= num_rows || d >= p.v.head_size) continue;
        float total = 0.f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) total += exchange[w * kQuadRows * kDims + i];
        if (partial == nullptr) {
          p.StoreOut(item.Token(p, row), item.Head(p, row), d, total * shared.factor[row]);
        } else {
          partial[row * shape.dims + d] = total;
        }
      }
      __syncthreads();
    }
  }

 private:
  __device__ static int Dim(int part) { return part * 128 + (threadIdx.x & 31) * kPart; }

  __device__ static void Multiply(Part (&x)[kParts], float factor) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kPart; ++i) x[part][i] *= factor;
    }
  }

  template <int kCount>
  __device__ static void LoadFloats(const float* from, float (&x)[kCount]) {
    if constexpr (kCount == 4) {
      const float4 four = *reinterpret_cast<const float4*>(from);
      x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    } else {
      const float2 two = *reinterpret_cast<const float2*>(from);
      x[0] = two.x, x[1] = two.y;
    }
  }

  // This lane's dims of 8 keys or values.
  __device__ static void Load(const char* keys, int part, bool e5m2, Part (&x)[kSimtSliceKeys]) {
#pragma unroll
    for (int key = 0; key < kSimtSliceKeys; ++key) {
      const char* from = keys + key * Loader::kRowBytes + Dim(part) * Loader::kElementSize;
      if constexpr (!kFp8) {
        LoadFloats(reinterpret_cast<const float*>(from), x[key]);
      } else {
#pragma unroll
        for (int i = 0; i < kPart; i += 2) {
          const float2 two = DecodeFp8x2(reinterpret_cast<const uint16_t*>(from)[i / 2], e5m2);
          x[key][i] = two.x, x[key][i + 1] = two.y;
        }
      }
    }
  }

  // Adds up each of the 32 numbers over the lanes; lane l gets the sum of number l. In each round a
  // lane gives away half of its numbers and gets what it keeps from a neighbour.
  template <int kLeft = 32>
  __device__ static float AddUp(float (&x)[32]) {
    if constexpr (kLeft == 1) {
      return x[0];
    } else {
      constexpr int kHalf = kLeft / 2;
      const bool upper = threadIdx.x & kHalf;
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        const float give = upper ? x[i] : x[i + kHalf];
        const float keep = upper ? x[i + kHalf] : x[i];
        x[i] = keep + __shfl_xor_sync(kAllLanes, give, kHalf);
      }
      return AddUp<kHalf>(x);
    }
  }

  // Takes this lane's score into the online softmax of its row; returns its weight.
  __device__ float AddScore(float score, int quad) {
    float new_max = fmaxf(score, row_max[quad]);
#pragma unroll
    for (int step = 1; step < kSimtSliceKeys; step *= 2) {
      new_max = fmaxf(new_max, __shfl_xor_sync(kAllLanes, new_max, step));
    }
    const float base = SoftmaxBase(new_max);
    if (__any_sync(kAllLanes, new_max != row_max[quad])) {
      const float factor = exp2f(row_max[quad] - base);
      row_max[quad] = new_max;
      row_sum[quad] *= factor;
#pragma unroll
      for (int r = 0; r < kQuadRows; ++r) {
        Multiply(out[quad * kQuadRows + r], __shfl_sync(kAllLanes, factor, r * kSimtSliceKeys));
      }
    }
    const float weight = exp2f(score - base);
    row_sum[quad] += weight;
    return weight;
  }

  // The largest row_max of the warps.
  __device__ static float LargestMax(int row, const Shared& shared) {
    float largest = -INFINITY;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, shared.row_max[w][row]);
    return largest;
  }

  // Stores what one row has beside its values: its LSE, or row_max and row_sum of a partial result.
  __device__ static void StoreSums(const Problem& p, const PartialShape& shape, float* partial,
                                   int row, Shared& shared) {
    const float row_max = LargestMax(row, shared);
    float row_sum = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      row_sum += shared.row_sum[w][row] * exp2f(shared.row_max[w][row] - SoftmaxBase(row_max));
    }
    if (partial != nullptr) {
      partial[shape.row_max() + row] = row_max;
      partial[shape.row_sum() + row] = row_sum;
      return;
    }
    const SimtItem& item = shared.item;
    const int token = item.Token(p, row), head = item.Head(p, row);
    const RowEnd end = {row_max, row_sum, p.Sink(head)};
    p.StoreLse(token, head, end);
    shared.factor[row] = end.Factor() * p.ValueScale(item.index, item.kv_head);
  }
};

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_SIMT_ROWS_CUH_
