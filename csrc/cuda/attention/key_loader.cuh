// A warp loads 16 keys and their values into shared memory, for warp-wide matrix instructions.
//
// A slice is 16 rows of kDims elements. It is stored as columns of 128 bytes, one column (16 rows)
// after the other. Within a column, the 16-byte chunk c of row r is at place c ^ (r % 8): this is
// TMA's 128-byte swizzle, and copies and matrix loads have no bank conflicts. fp8 is loaded into a
// slice of bytes and widened to f16 from there.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_KEY_LOADER_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_KEY_LOADER_CUH_

#include "cuda/attention/dtypes.cuh"
#include "cuda/attention/mma.cuh"
#include "cuda/attention/problem.cuh"
#include "cuda/attention/warp.cuh"

namespace flashxla::attention {

constexpr int kSliceKeys = 16;

// Byte offset of a chunk in a slice with kChunks chunks per row.
template <int kChunks>
__device__ inline int ChunkOffset(int row, int chunk) {
  if constexpr (kChunks < 8) return (row * kChunks + (chunk ^ (row % kChunks))) * 16;
  return (chunk / 8 * kSliceKeys * 8 + row * 8 + (chunk % 8 ^ row % 8)) * 16;
}

template <int kDims>
constexpr int kSliceBytes = kSliceKeys * kDims * 2;

// Where a warp's next 16 keys lie; lane l holds key l % 16. Find starts to load the block table's
// entries one step before the copies start, to hide the latency; Resolve uses them.
struct KeyPlaces {
  int block, token;
  bool inside, seen;  // it is before the last key; it is not left padding (leftpad_k)
  bool there;         // it is inside, and its table entry is sound
  uint32_t mask;      // which of the 16 are there and seen

  __device__ static KeyPlaces None() { return {0, 0, false, false, false, 0}; }

  // Keys [first, first + 16) of a sequence.
  __device__ static KeyPlaces Find(const Problem& p, const Sequence& s, int index, int first) {
    const int j = first + (threadIdx.x & 15);
    KeyPlaces places = None();
    places.inside = j < s.num_keys;
    places.seen = j >= s.first_key;
    places.token = s.key_row + j;
    if (p.block_table.data != nullptr) {
      const int page = p.PageOf(j);
      places.token = j - page * p.block_table.block_size;
      if (places.inside) places.block = Entry(p.block_table, index, page);
    }
    return places;
  }

  // All lanes of the warp must call this.
  __device__ void Resolve(const Problem& p) {
    there = inside && IsSound(p.block_table, block);
    if (!there) block = token = 0;
    mask = __ballot_sync(kAllLanes, there && seen) & 0xffffu;
  }

  __device__ int64_t OffsetIn(const Cache& c) const {
    return block * c.stride_block + token * c.stride_token;
  }
};

template <int kDims, bool kFp8>
struct KeyLoader {
  static constexpr int kElementSize = kFp8 ? 1 : 2;
  static constexpr int kRowBytes = kDims * kElementSize;
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kRowsAtOnce = 32 / kChunks;
  // A warp's stage: keys, then values.
  static constexpr int kHalfBytes = kSliceKeys * kRowBytes;
  static constexpr int kStageBytes = 2 * kHalfBytes;
  static_assert(kRowsAtOnce >= 1 && kRowsAtOnce <= kSliceKeys);

  // Starts the copies of 16 keys and values of one KV head into `stage`; those that do not exist
  // become zeros. All lanes of the warp must call this. Not all ways to copy write columns past
  // head_size: the kernel zeroes them once.
  __device__ static void Start(const Problem& p, const KeyPlaces& places, int kv_head,
                               char* stage) {
    const char* k = p.k.data + kv_head * p.k.stride_head * kElementSize;
    const char* v = p.v.data + kv_head * p.v.stride_head * kElementSize;
    if (!p.kv_vectors() || !p.kv_near) {
      return p.kv_unit == 16  ? StartUnits<16>(p, places, k, v, stage)
             : p.kv_unit == 8 ? StartUnits<8>(p, places, k, v, stage)
             : p.kv_unit == 4 ? StartUnits<4>(p, places, k, v, stage)
                              : StartElements(p, places, k, v, stage);
    }
    const int lane = threadIdx.x & 31;
    const int chunk = lane % kChunks, lane_row = lane / kChunks;
    const bool in_k = chunk * 16 < p.k.head_size * kElementSize;
    const bool in_v = chunk * 16 < p.v.head_size * kElementSize;
    k += chunk * 16, v += chunk * 16;
    // In units of 16 bytes, offsets fit 32 bits (kv_near).
    const auto vector_k = static_cast<uint32_t>(places.OffsetIn(p.k) / (16 / kElementSize));
    const auto vector_v = static_cast<uint32_t>(places.OffsetIn(p.v) / (16 / kElementSize));
    const uint32_t to = SharedAddress(stage);
#pragma unroll
    for (int r = 0; r < kSliceKeys; r += kRowsAtOnce) {
      const int row = r + lane_row;
      const uint64_t from_k = __shfl_sync(kAllLanes, vector_k, row);
      const uint64_t from_v = __shfl_sync(kAllLanes, vector_v, row);
      const bool valid = (places.mask >> row) & 1;
      const int offset = ChunkOffset<kChunks>(row, chunk);
      CopyAsync16(to + offset, k + from_k * 16, valid && in_k);
      CopyAsync16(to + kHalfBytes + offset, v + from_v * 16, valid && in_v);
    }
  }

 private:
  using Element = std::conditional_t<kFp8, uint8_t, uint16_t>;

  // Copies of so many bytes, at 64-bit offsets.
  template <int kUnit>
  __device__ __noinline__ static void StartUnits(const Problem& p, const KeyPlaces& places,
                                                 const char* k, const char* v, char* stage) {
    const int lane = threadIdx.x & 31;
    const int64_t offset_k = places.OffsetIn(p.k), offset_v = places.OffsetIn(p.v);
    const int k_bytes = p.k.head_size * kElementSize, v_bytes = p.v.head_size * kElementSize;
    const uint32_t to = SharedAddress(stage);
#pragma unroll 2
    for (int row = 0; row < kSliceKeys; ++row) {
      const char* from_k = k + __shfl_sync(kAllLanes, offset_k, row) * kElementSize;
      const char* from_v = v + __shfl_sync(kAllLanes, offset_v, row) * kElementSize;
      const bool valid = (places.mask >> row) & 1;
      for (int at = lane * kUnit; at < kRowBytes; at += 32 * kUnit) {
        const int offset = ChunkOffset<kChunks>(row, at / 16) + at % 16;
        if (at < k_bytes) CopyAsync<kUnit>(to + offset, from_k + at, valid);
        if (at < v_bytes) CopyAsync<kUnit>(to + kHalfBytes + offset, from_v + at, valid);
      }
    }
  }

  // Any strides, alignment and head size.
  __device__ __noinline__ static void StartElements(const Problem& p, const KeyPlaces& places,
                                                    const char* k, const char* v, char* stage) {
    constexpr int kPerChunk = 16 / kElementSize;
    const int lane = threadIdx.x & 31;
    const int64_t offset_k = places.OffsetIn(p.k), offset_v = places.OffsetIn(p.v);
    for (int row = 0; row < kSliceKeys; ++row) {
      const int64_t from_k = __shfl_sync(kAllLanes, offset_k, row);
      const int64_t from_v = __shfl_sync(kAllLanes, offset_v, row);
      const bool valid = (places.mask >> row) & 1;
      for (int d = lane; d < p.LargerHeadSize(); d += 32) {
        const bool in_k = d < p.k.head_size, in_v = d < p.v.head_size;
        Element key = 0, value = 0;  // both are loaded before one is awaited
        if (valid && in_k) {
          key = reinterpret_cast<const Element*>(k)[from_k + d * p.k.stride_dim];
        }
        if (valid && in_v) {
          value = reinterpret_cast<const Element*>(v)[from_v + d * p.v.stride_dim];
        }
        auto* to = reinterpret_cast<Element*>(stage + ChunkOffset<kChunks>(row, d / kPerChunk)) +
                   d % kPerChunk;
        if (in_k) *to = key;
        if (in_v) to[kHalfBytes / kElementSize] = value;
      }
    }
  }
};

// Widens a warp's fp8 stage (keys, values) to slices of f16; exact.
template <int kDims, bool kE5m2>
__device__ inline void WidenFp8(const char* stage, char* wide) {
  using Loader = KeyLoader<kDims, true>;
  constexpr int kWideChunks = kDims / 8;
  const int lane = threadIdx.x & 31;
#pragma unroll 4
  for (int i = lane; i < 2 * kSliceKeys * Loader::kChunks; i += 32) {
    const int row = i / Loader::kChunks, chunk = i % Loader::kChunks;  // rows 16..31: values
    const int half = row / kSliceKeys, r = row % kSliceKeys;
    const uint4 bytes = *reinterpret_cast<const uint4*>(stage + half * Loader::kHalfBytes +
                                                        ChunkOffset<Loader::kChunks>(r, chunk));
    const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
    uint32_t out[8];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      WidenFp8x4<kE5m2>(words[w], &out[2 * w], &out[2 * w + 1]);
    }
    char* to = wide + half * kSliceBytes<kDims>;
    *reinterpret_cast<uint4*>(to + ChunkOffset<kWideChunks>(r, 2 * chunk)) =
        make_uint4(out[0], out[1], out[2], out[3]);
    *reinterpret_cast<uint4*>(to + ChunkOffset<kWideChunks>(r, 2 * chunk + 1)) =
        make_uint4(out[4], out[5], out[6], out[7]);
  }
}

template <int kDims>
__device__ inline void WidenFp8(const char* stage, char* wide, bool e5m2) {
  e5m2 ? WidenFp8<kDims, true>(stage, wide) : WidenFp8<kDims, false>(stage, wide);
}

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_KEY_LOADER_CUH_
