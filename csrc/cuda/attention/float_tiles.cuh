// The kv tiles of a q tile of 64 rows, in float32: keys and values go through shared memory, which
// they reach while the products before are computed.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_FLOAT_TILES_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_FLOAT_TILES_CUH_

#include <type_traits>

#include "cuda/attention/key_loader.cuh"
#include "cuda/attention/simt_item.cuh"

namespace flashxla::attention {

// kOneBuffer: keys and values take turns in one buffer, for want of shared memory.
template <int kDims, int kKeys, int kWarps, bool kOneBuffer>
struct alignas(16) FloatTilesShared {
  // Four floats more than a power of two: neighbouring rows start in different banks.
  static constexpr int kStride = kDims + 4;
  // The weights of a kv tile pass in parts of so many keys.
  static constexpr int kWeightKeys = kKeys < 32 ? kKeys : 32;
  // 16 more than a multiple of the 32 banks: a lane pair's rows lie in different banks.
  static constexpr int kWeightStride = kWeightKeys / 32 * 32 + 16;
  float q[kRestQTileRows * kStride];
  float buffers[kOneBuffer ? 1 : 2][kKeys * kStride];  // keys, values
  float weights[kRestQTileRows * kWeightStride];
  SimtRow rows[kRestQTileRows];
  bool stored[kRestQTileRows];  // whether a row's result is
  uint32_t exist[2][kWarps];    // which keys of this kv tile and the next, as each warp loads them
};

template <int kDimsOf, int kKeysOf, int kWarpsOf, bool kFp8, bool kOneBuffer>
struct FloatTiles {
  using Shared = FloatTilesShared<kDimsOf, kKeysOf, kWarpsOf, kOneBuffer>;
  static constexpr int kDims = kDimsOf, kKeys = kKeysOf, kWarps = kWarpsOf;
  static constexpr int kStride = Shared::kStride;

  // Starts to load the queries, and finds the rows' masks. All threads of the block must call it.
  // They may use both once ForEach calls back.
  __device__ static void Begin(const Problem& p, const SimtItem& item, Shared& shared) {
    LoadQueries<kDims, kStride, true>(p, item, kRestQTileRows, shared.q);
    if (threadIdx.x < kRestQTileRows) shared.rows[threadIdx.x] = item.Row(p, threadIdx.x);
  }

  // Calls multiply(keys), weigh(first, stage) and add(values, num_keys) for each kv tile, whose
  // first key is `first`. All threads of the block must call it. It may be called again after a
  // barrier.
  template <typename Multiply, typename Weigh, typename Add>
  __device__ static void ForEach(const Problem& p, const SimtItem& item, Shared& shared,
                                 Multiply&& multiply, Weigh&& weigh, Add&& add) {
    float* keys = shared.buffers[0];
    float* values = shared.buffers[kOneBuffer ? 0 : 1];
    // Where a kv tile begins must not depend on the q tile: see batch_invariant.
    const int begin = item.begin / kKeys * kKeys;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    KeyPlaces places = Find(p, item, begin);
    auto load_keys = [&](int stage) {
      places.Resolve(p);
      if (lane == 0) shared.exist[stage][warp] = places.mask & kWarpMask;
      StartLoad(p, p.k, places, item.kv_head, keys);
      CommitCopies();
    };
    load_keys(0);
    int stage = 0;
#pragma unroll 1
    for (int first = begin; first < item.end; first += kKeys, stage ^= 1) {
      auto load_values = [&] {
        StartLoad(p, p.v, places, item.kv_head, values);
        CommitCopies();
        places = Find(p, item, first + kKeys);  // used when the next keys are loaded
      };
      WaitCopies<0>();
      __syncthreads();  // the keys are there; all have used the values before
      if (!kOneBuffer) load_values();
      multiply(keys);
      if (kOneBuffer) {
        __syncthreads();  // all have used the keys
        load_values();
      }
      weigh(first, stage);
      WaitCopies<0>();
      __syncthreads();  // the values are there; all have used the keys
      const bool more = first + kKeys < item.end;
      if (!kOneBuffer && more) load_keys(stage ^ 1);
      add(values, min(kKeys, item.end - first));
      if (kOneBuffer && more) {
        __syncthreads();  // all have used the values
        load_keys(stage ^ 1);
      }
    }
    WaitCopies<0>();  // if no row sees a key, nobody has waited for the first ones
  }

  // Whether every row sees every key of the kv tile that starts at `first`, as in most of them.
  __device__ static bool AllSeen(const SimtItem& item, const Shared& shared, int first, int stage) {
    bool all_exist = true;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) all_exist = all_exist && shared.exist[stage][w] == kWarpMask;
    return all_exist && item.plain && first >= item.begin_all &&
           int64_t{first} + kKeys <= item.end_all;
  }

  // Whether key `key` of the kv tile exists.
  __device__ static bool Exists(const Shared& shared, int stage, int key) {
    return (shared.exist[stage][key / kLoads] >> (key % kLoads)) & 1;
  }

 private:
  // A warp loads so many keys.
  static constexpr int kLoads = kKeys / kWarps;
  static constexpr uint32_t kWarpMask = (1u << kLoads) - 1;
  static constexpr int kChunks = kDims / 4, kAcross = kChunks < 32 ? kChunks : 32;
  static constexpr int kLoadsAtOnce = 32 / kAcross;
  static_assert(kKeys % 16 == 0 && kDims % 64 == 0 && kLoads <= kSliceKeys &&
                kLoads % kLoadsAtOnce == 0);

  // The places of the keys that this warp loads, of the kv tile that starts at key `first`.
  __device__ static KeyPlaces Find(const Problem& p, const SimtItem& item, int first) {
    Sequence seen = item.s;
    seen.first_key = item.begin, seen.num_keys = item.end;
    return KeyPlaces::Find(p, seen, item.index,
                           first + static_cast<int>(threadIdx.x) / 32 * kLoads);
  }

  // Calls body(key, dim) for what this lane loads: 4 dims of the keys of its warp. All lanes.
  template <typename Body>
  __device__ static void ForEachChunk(Body&& body) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kLoads; n += kLoadsAtOnce) {
#pragma unroll
      for (int c = 0; c < kChunks; c += kAcross) body(n + lane / kAcross, (c + lane % kAcross) * 4);
    }
  }

  // Starts to load this warp's keys or values into shared memory; zeros for those that do not
  // exist.
  __device__ static void StartLoad(const Problem& p, const Cache& c, const KeyPlaces& places,
                                   int kv_head, float* to) {
    const int64_t offset = places.OffsetIn(c) + kv_head * c.stride_head;
    to += threadIdx.x / 32 * kLoads * kStride;
    if (kFp8 || !p.kv_vectors()) return LoadFloats(p, c, offset, places.mask, to);
    const uint32_t address = SharedAddress(to);
    const auto mine = reinterpret_cast<unsigned long long>(c.data + offset * 4);
    const int dims = (c.head_size + 15) / 16 * 16;  // matrix instructions read these
    auto start = [&](auto all) {
      ForEachChunk([&](int key, int d) {
        const auto from = __shfl_sync(kAllLanes, mine, key);
        if (d >= dims) return;
        const bool exists = decltype(all)::value || ((places.mask >> key) & 1);
        CopyAsync16(address + (key * kStride + d) * 4, reinterpret_cast<const float*>(from) + d,
                    exists && d < c.head_size);
      });
    };
    (places.mask & kWarpMask) == kWarpMask ? start(std::true_type()) : start(std::false_type());
  }

  // The same through registers: fp8, which is widened, and any strides.
  __device__ static void LoadFloats(const Problem& p, const Cache& c, int64_t offset, uint32_t mask,
                                    float* to) {
    constexpr int kEach = kLoads * kChunks / 32, kBest = kFp8 ? 8 : 4;  // of a lane; on their way
    constexpr int kAtOnce = kEach < kBest ? kEach : kBest, kPieces = kChunks / kAcross;
    static_assert(kEach % kAtOnce == 0);
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int base = 0; base < kEach; base += kAtOnce) {
      float4 x[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int key = (base + i) / kPieces * kLoadsAtOnce + lane / kAcross;
        const int d = ((base + i) % kPieces * kAcross + lane % kAcross) * 4;
        const int64_t from = __shfl_sync(kAllLanes, offset, key);
        x[i] = make_float4(0.f, 0.f, 0.f, 0.f);
        if ((mask >> key) & 1) x[i] = LoadFour<kFp8>(p, c, from, d);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int key = (base + i) / kPieces * kLoadsAtOnce + lane / kAcross;
        const int d = ((base + i) % kPieces * kAcross + lane % kAcross) * 4;
        *reinterpret_cast<float4*>(to + key * kStride + d) = x[i];
      }
    }
  }
};

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_FLOAT_TILES_CUH_
