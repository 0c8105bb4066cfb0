// wide's producer warps where an fp8 cache has small pages, or odd heads (wide_odd.cuh): they load
// the keys row by row, and convert them.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_GATHER_FP8_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_GATHER_FP8_CUH_

#include "cuda/attention/wide_fp8.cuh"
#include "cuda/attention/wide_gather.cuh"

namespace flashxla::attention {

#if defined(FLASHXLA_HOPPER)

// A warp's rows of kv tiles, from memory through registers to where the products find them, in
// 16 bits. A chunk is 64 columns of 8 keys, of which a lane has 16: as in WidenTile, of key k or
// k + 4 of each 8. kUnit: bytes that strides and addresses allow to load at a time.
template <typename S, int kUnit>
class WidenedRows {
 public:
  __device__ WidenedRows(const Problem& problem, const ManyTile& q_tile)
      : p_(problem), tile_(q_tile) {}

  // A q tile's first kv tile is n: starts to load its keys.
  __device__ void Begin(int n) {
    now_ = Find(n);
#pragma unroll
    for (int c = 0; c < kAhead; ++c) Load(p_.k, now_, c);
  }
  // To be called before this kv tile's values are converted: n is the next one.
  __device__ void Locate(int n) { (kOnlyAfter ? now_ : next_) = Find(n); }
  // To be called after them.
  __device__ void Advance() {
    if (!kOnlyAfter) now_ = next_;
  }

  // Convert what was loaded and store it at `stage`. Meanwhile they start to load what follows: the
  // kv tile's values, or the next one's keys.
  template <typename T, bool kE5m2>
  __device__ void ConvertKeys(uint32_t stage) {
    Convert<T, kE5m2>(stage, p_.k, p_.v, now_);
  }
  template <bool kE5m2>
  __device__ void ConvertValues(uint32_t stage) {
    Convert<__half, kE5m2>(stage, p_.v, p_.k, kOnlyAfter ? now_ : next_);
  }

 private:
  static constexpr int kWarps = S::kProducerThreads / 32;
  static constexpr int kGroups = S::kKeys / 8 / kWarps;  // of 8 keys
  static constexpr int kChunks = kGroups * S::kBlocks;
  // Chunks on the way; more registers are not left.
  static constexpr int kAhead = kChunks > 3 && S::kProducerRegisters < 48 ? kChunks / 2 : kChunks;
  // Those that start while values are converted are of the next kv tile, so that `now_` may be.
  static constexpr bool kOnlyAfter = kAhead == kChunks;
  static_assert(kGroups * 8 * kWarps == S::kKeys && kChunks % kAhead == 0);

  struct Places {
    int block[kGroups], token[kGroups];
  };

  __device__ static int FirstGroup() { return threadIdx.x / 32 * kGroups; }
  __device__ static int Key() { return threadIdx.x % 32 / 8 + threadIdx.x / 4 % 2 * 4; }

  __device__ Places Find(int n) const {
    Places places;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int key = n * S::kKeys + (FirstGroup() + g) * 8 + Key();
      const bool exists = key >= 0 && key < tile_.s.num_keys;
      if (S::kOddHeads && p_.block_table.data == nullptr) {
        places.block[g] = exists ? 0 : -1, places.token[g] = tile_.s.key_row + key;
        continue;
      }
      const int page = exists ? p_.PageOf(key) : 0;
      places.block[g] = exists ? Entry(p_.block_table, tile_.index, page) : -1;
      places.token[g] = key - page * p_.block_table.block_size;
    }
    return places;
  }

  __device__ void Load(const Cache& cache, const Places& places, int chunk) {
    auto unit = [](int64_t stride) { return static_cast<uint32_t>(stride / kUnit); };
    const int g = chunk / S::kBlocks, vector = chunk % S::kBlocks * 4 + threadIdx.x % 4;
    uint4& row = rows_[chunk % kAhead];
    row = make_uint4(0, 0, 0, 0);
    // The page of keys that no row sees may be unsound: see CheckTables.
    if (!IsSound(p_.block_table, places.block[g]) || vector * 16 >= cache.head_size) return;
    // In units in which offsets fit 32 bits (kv_near).
    const uint32_t offset = places.block[g] * unit(cache.stride_block) +
                            places.token[g] * unit(cache.stride_token) +
                            tile_.kv_head * unit(cache.stride_head);
    const char* from = cache.data + uint64_t{offset} * kUnit + vector * 16;
    // Past L1, as all copies: the kernel before may have written it, and no other warp wants it.
    if constexpr (kUnit == 16) {
      row = __ldcg(reinterpret_cast<const uint4*>(from));
    } else {
      const int bytes = cache.head_size - vector * 16;
      uint32_t* const words = &row.x;
#pragma unroll
      for (int i = 0; i < 16 / kUnit; ++i) {
        if (i * kUnit >= bytes) continue;
        if constexpr (kUnit == 8) {
          const uint2 pair = __ldcg(reinterpret_cast<const uint2*>(from) + i);
          words[2 * i] = pair.x, words[2 * i + 1] = pair.y;
        } else {
          words[i] = __ldcg(reinterpret_cast<const uint32_t*>(from) + i);
        }
      }
    }
  }

  template <typename T, bool kE5m2>
  __device__ void Convert(uint32_t stage, const Cache& cache, const Cache& after,
                          const Places& places_after) {
    const int late = threadIdx.x / 4 % 2, vector = threadIdx.x % 4;
    const uint32_t to =
        stage + (FirstGroup() * 8 + Key()) * kWideRowBytes + (vector * 2 + late ^ Key()) * 16;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const uint4 raw = rows_[c % kAhead];
      const uint32_t x[4] = {raw.x, raw.y, raw.z, raw.w};
      uint32_t y[8];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        WidenTo<T, kE5m2>(late ? x[j ^ 2] : x[j], &y[2 * j], &y[2 * j + 1]);
      }
      c + kAhead < kChunks ? Load(cache, now_, c + kAhead)
                           : Load(after, places_after, c + kAhead - kChunks);
      const uint32_t row = to + (c % S::kBlocks * S::kKeys + c / S::kBlocks * 8) * kWideRowBytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) StoreShared16(row ^ half * 16, &y[4 * half]);
    }
  }

  const Problem& p_;
  const ManyTile& tile_;
  Places now_, next_;
  uint4 rows_[kAhead];
};

// fp8 keys under 16-bit products. T: of the keys' products; those of values are of float16.
template <typename T, typename S, bool kE5m2, int kUnit = 16>
__device__ void GatherWidened(const WideProblem& w, const WideShared<S>& shared, int items) {
  PipelineState<S::kStages> keys;
  PipelineState<S::kValueStages> values;
  ForEachTile(w, shared, items, threadIdx.x / 32 == shared.Leader(true), [&](const ManyTile& tile) {
    const int first = tile.begin / S::kKeys;
    int n = (tile.end + S::kKeys - 1) / S::kKeys - 1;
    WidenedRows<S, kUnit> rows(w.p, tile);
    rows.Begin(n);
#pragma unroll 1
    for (; n >= first; --n) {
      WaitBarrier(shared.keys_empty(keys.stage), keys.parity ^ 1);
      rows.template ConvertKeys<T, kE5m2>(shared.keys(keys.stage));
      ReleaseStores(shared.keys_full(keys.stage));
      keys.Next();
      rows.Locate(n - 1);
      WaitBarrier(shared.values_empty(values.stage), values.parity ^ 1);
      rows.template ConvertValues<kE5m2>(shared.values(values.stage));
      ReleaseStores(shared.values_full(values.stage));
      values.Next();
      rows.Advance();
    }
  });
}

template <typename T, typename S, bool kE5m2>
__device__ void GatherOddWidened(const WideProblem& w, const WideShared<S>& shared, int items) {
  switch (w.p.kv_unit) {
    case 16:
      return GatherWidened<T, S, kE5m2>(w, shared, items);
    case 8:
      return GatherWidened<T, S, kE5m2, 8>(w, shared, items);
  }
  GatherWidened<T, S, kE5m2, 4>(w, shared, items);
}

// Products of e4m3: keys are copied to where these find them, and values to raw stages, from which
// all warps but the first turn them around.
template <typename S>
__device__ void GatherFp8(const WideProblem& w, const WideShared<S>& shared, int items) {
  const Problem& p = w.p;
  PipelineState<S::kStages> keys;
  PipelineState<S::kValueStages> values;
  PipelineState<S::kRawStages> copied, turned;
  uint32_t on_the_way = 0;  // which keys
  auto finish_keys = [&] {
    if (on_the_way == 0) return;
    ReleaseStores(on_the_way);
    on_the_way = 0;
  };
  const bool turns = threadIdx.x >= 32;
  ForEachTile(w, shared, items, !turns, [&](const ManyTile& tile) {
    const WideRows<S> rows{p, tile};
    const WideRows<S, true> value_rows{p, tile};
    const int first_row = threadIdx.x / 32 * WideRows<S>::kCount;
    const int first = tile.begin / S::kKeys, last = (tile.end + S::kKeys - 1) / S::kKeys - 1;
    int2 place = rows.Locate(last, first_row);
    // A kv tile is copied while the one before it is turned.
#pragma unroll 1
    for (int n = last; n >= first - 1; --n) {
      if (n >= first) {
        const int2 next = rows.Locate(n - 1, first_row);
        WaitBarrier(shared.keys_empty(keys.stage), keys.parity ^ 1);
        rows.Copy(p.k, place, first_row, shared.keys(keys.stage));
        CommitCopies();
        WaitCopies<1>();  // those before
        finish_keys();
        on_the_way = shared.keys_full(keys.stage);
        keys.Next();
        WaitBarrier(shared.raw_empty(copied.stage), copied.parity ^ 1);
        value_rows.Copy(p.v, place, first_row, shared.raw(copied.stage));
        ArriveAfterCopies(shared.raw_full(copied.stage));
        copied.Next();
        place = next;
      }
      if (!turns || n == last) continue;
      WaitBarrier(shared.raw_full(turned.stage), turned.parity);
      WaitBarrier(shared.values_empty(values.stage), values.parity ^ 1);
      const int before = (n + 1) * S::kKeys;
      TurnTile<S>(shared.raw(turned.stage), shared.values(values.stage), tile.s.first_key - before,
                  tile.s.num_keys - before);
      ReleaseStores(shared.values_full(values.stage)), Release(shared.raw_empty(turned.stage));
      values.Next(), turned.Next();
    }
    WaitCopies<0>();
    finish_keys();
  });
}

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_GATHER_FP8_CUH_
