// The kernels of the tile engines. One writes grad_q: a thread block per row tile and head goes
// over the keys. One writes grad_k and grad_v: a thread block per 64 rows of k and KV head goes
// over the queries of all sequences that have keys there. So all sums have one order, and sequences
// may have keys in common.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_TILE_KERNELS_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_TILE_KERNELS_CUH_

#include <algorithm>

#include "cuda/attention/dispatch.cuh"
#include "cuda/attention_backward/engines.h"
#include "cuda/attention_backward/tile_products.cuh"
#include "cuda/attention_backward/tile_queries.cuh"

namespace flashxla::attention_backward {

using attention::CommitCopies;
using attention::SharedAddress;
using attention::WaitCopies;

constexpr int kTileStages = 2;

// How a kernel uses shared memory: stages with matrices of the side that the thread block goes
// over, and the two matrices that it owns. Those that go to registers are loaded where the stages
// lie.
template <typename Products, bool kInRegisters>
struct TileShared {
  static constexpr int kHalfBytes = Products::kStageRows / kSliceRows * Products::kSliceBytes;
  static constexpr int kStageBytes = 2 * kHalfBytes;
  static constexpr int kOwnHalfBytes = kTileWarps * Products::kSliceBytes;
  static constexpr int kOwnAt = kInRegisters ? 0 : kTileStages * kStageBytes;
  static constexpr int kBytes = kTileStages * kStageBytes + (kInRegisters ? 0 : 2 * kOwnHalfBytes);
  static_assert(kOwnAt + 2 * kOwnHalfBytes <= kBytes);
};

// Starts to copy rows first, first + 1, ... of a head to shared memory. Rows from `count` on, and
// dims past head_size, become zeros.
template <typename T, int kDims, int kRows>
__device__ void StartRows(const Rows& rows, int64_t first, int count, int head, int head_size,
                          uint32_t to) {
  constexpr int kBytes = sizeof(T), kElements = 16 / kBytes, kChunks = kDims / kElements;
  constexpr int kAtOnce = kTileThreads / kChunks;
  const int chunk = threadIdx.x % kChunks;
  const bool inside = chunk * kElements < head_size;
  const char* from =
      rows.data +
      (first * rows.stride_token + head * rows.stride_head + chunk * kElements) * kBytes;
#pragma unroll
  for (int i = 0; i < kRows / kAtOnce; ++i) {
    const int row = threadIdx.x / kChunks + i * kAtOnce;
    const bool valid = inside && row < count;
    attention::CopyAsync16(TileProducts<T, kDims>::Place(to, row, chunk),
                           valid ? from + row * rows.stride_token * kBytes : rows.data, valid);
  }
}

// Whether another engine serves the call.
__device__ inline bool IsServed(const Problem& p) { return p.only_shared && !p.plan.shares_keys(); }

// 16 queries, of a warp, by the keys of a stage.
struct QueryRows {
  float lse2[2], delta[2];
  int begin[2], end[2];  // keys that each row sees
  int64_t diagonal;      // position of this lane's first row among the keys
  int key;               // of this lane's first column

  __device__ RowSums Sums(int) const {
    return {{lse2[0], lse2[0], lse2[1], lse2[1]}, {delta[0], delta[0], delta[1], delta[1]}};
  }
  __device__ bool Sees(int n, int i) const {
    const int j = key + n * 8 + i % 2;
    return j >= begin[i / 2] && j < end[i / 2];
  }
  __device__ int64_t Distance(int n, int i) const {
    return diagonal + i / 2 * 8 - (key + n * 8 + i % 2);
  }
};

template <typename T, int kDims>
__global__ void __launch_bounds__(kTileThreads, TileProducts<T, kDims>::kBlocksEach)
    GradQKernel(const __grid_constant__ Problem p) {
  using M = TileProducts<T, kDims>;
  using S = TileShared<M, M::kOwnInRegisters>;
  constexpr int kKeys = M::kStageRows;
  extern __shared__ __align__(1024) char shared[];
  if (IsServed(p)) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t stages = SharedAddress(shared);
  const int num_tiles = p.plan.row_tile_starts[p.plan.num_sequences];
  const int64_t num_items = int64_t{num_tiles} * p.num_heads;

  for (int64_t item = blockIdx.x; item < num_items; item += gridDim.x) {
    // Backwards: the last row tiles of a sequence see the most keys and should start first.
    const int tile = num_tiles - 1 - static_cast<int>(item / p.num_heads);
    const int head = static_cast<int>(item % p.num_heads), kv_head = head / p.group_size;
    const int index = attention::FindStart(p.plan.row_tile_starts, p.plan.num_sequences, tile);
    const PlannedSequence s = p.plan.sequences[index];
    const int first = (tile - p.plan.row_tile_starts[index]) * kRowTile;
    const int count = min(kRowTile, s.num_queries - first);
    const int64_t token = int64_t{s.first_query} + first;
    const KeyRange seen = p.Visible(s, first, first + count - 1);

    const uint32_t own = stages + S::kOwnAt;
    StartRows<T, kDims, kOwnRows>(p.q, token, count, head, p.head_size, own);
    StartRows<T, kDims, kOwnRows>(p.grad_out, token, count, head, p.v_head_size,
                                  own + S::kOwnHalfBytes);
    CommitCopies();

    // What this warp's queries see: some of them, and all.
    const int warp_first = first + warp * kSliceRows;
    const int warp_last = min(warp_first + kSliceRows, first + count) - 1;
    KeyRange some = {0, 0}, all = {0, 0};
    if (warp_first <= warp_last) some = p.Visible(s, warp_first, warp_last);
    if (warp_last == warp_first + kSliceRows - 1) {
      all = {p.Visible(s, warp_last, warp_last).begin, p.Visible(s, warp_first, warp_first).end};
    }
    QueryRows rows;
    rows.diagonal = int64_t{warp_first} + lane / 4 + s.length - s.num_queries;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = warp_first + lane / 4 + 8 * r;
      const KeyRange keys = query <= warp_last ? p.Visible(s, query, query) : KeyRange{0, 0};
      rows.begin[r] = keys.begin, rows.end[r] = keys.end;
      const int64_t place = p.RowPlace(index, query, head);  // row tiles are padded
      rows.lse2[r] = p.lse2[place], rows.delta[r] = p.delta[place];
    }
    const float slope = p.alibi_slopes.at(index, head, 0.f);

    WaitCopies<0>();
    __syncthreads();
    typename M::template OwnRows<M::kOwnInRegisters> q, grad_out;
    q.Begin(own + warp * M::kSliceBytes);
    grad_out.Begin(own + S::kOwnHalfBytes + warp * M::kSliceBytes);
    if constexpr (M::kOwnInRegisters) __syncthreads();  // the stages lie there

    auto load = [&](int stage, int key) {
      if (key < seen.end) {
        const uint32_t to = stages + stage * S::kStageBytes;
        const int64_t row = int64_t{s.key_row} + key;
        StartRows<T, kDims, kKeys>(p.k, row, seen.end - key, kv_head, p.head_size, to);
        StartRows<T, kDims, kKeys>(p.v, row, seen.end - key, kv_head, p.v_head_size,
                                   to + S::kHalfBytes);
      }
      CommitCopies();
    };
    load(0, seen.begin);
    load(1, seen.begin + kKeys);
    Columns<kDims> grad_q;
    SetZero<kDims>(grad_q);
    int stage = 0;
    for (int key = seen.begin; key < seen.end; key += kKeys, stage ^= 1) {
      WaitCopies<kTileStages - 1>();
      __syncthreads();
      if (key < some.end && key + kKeys > some.begin) {
        const uint32_t k = stages + stage * S::kStageBytes, v = k + S::kHalfBytes;
        Columns<kKeys> dots, grads;
        SetZero<kKeys>(dots);
        SetZero<kKeys>(grads);
        M::template AddDots<kKeys>(dots, q, k, p.head_size);
        M::template AddDots<kKeys>(grads, grad_out, v, p.v_head_size);
        rows.key = key + lane % 4 * 2;
        const bool masked = key < all.begin || key + kKeys > all.end;
        Weigh<true, kKeys>(p, rows, slope, masked, dots, grads);
        M::template AddProduct<kKeys>(grad_q, grads, k, p.head_size, masked);
      }
      __syncthreads();
      load(stage, key + kTileStages * kKeys);
    }
    WaitCopies<0>();
    M::StoreRows(p.grad_q, token, count, head, p.head_size, p.softmax_scale, grad_q);
    __syncthreads();
  }
}

template <typename T, int kDims>
struct KeyTile {
  static constexpr int kQueries = TileProducts<T, kDims>::kStageRows;
  using S = TileShared<TileProducts<T, kDims>, false>;
  using Stage = QueryStage<kQueries>;
  static constexpr int kBytes = S::kBytes + kTileStages * static_cast<int>(sizeof(Stage));
};

template <typename T, int kDims, bool kGradK, bool kGradV>
__global__ void __launch_bounds__(kTileThreads, TileProducts<T, kDims>::kBlocksEach)
    GradKVKernel(const __grid_constant__ Problem p) {
  using Tile = KeyTile<T, kDims>;
  using M = TileProducts<T, kDims>;
  using S = typename Tile::S;
  constexpr int kQueries = Tile::kQueries;
  extern __shared__ __align__(1024) char shared[];
  if (IsServed(p)) return;
  const int warp = threadIdx.x / 32;
  const uint32_t stages = SharedAddress(shared);
  auto* infos = reinterpret_cast<typename Tile::Stage*>(shared + S::kBytes);
  const int num_tiles = (p.num_keys + kOwnRows - 1) / kOwnRows;
  const int64_t num_items = int64_t{num_tiles} * p.num_kv_heads;

  for (int64_t item = blockIdx.x; item < num_items; item += gridDim.x) {
    // Under a causal mask, most queries see the first keys.
    const int first_row = static_cast<int>(item / p.num_kv_heads) * kOwnRows;
    const int kv_head = static_cast<int>(item % p.num_kv_heads);
    const int count = min(kOwnRows, p.num_keys - first_row);

    const uint32_t own = stages + S::kOwnAt;
    StartRows<T, kDims, kOwnRows>(p.k, first_row, count, kv_head, p.head_size, own);
    if constexpr (kGradK) {
      StartRows<T, kDims, kOwnRows>(p.v, first_row, count, kv_head, p.v_head_size,
                                    own + S::kOwnHalfBytes);
    }
    CommitCopies();
    WaitCopies<0>();
    __syncthreads();
    typename M::template OwnRows<false> k, v;
    k.Begin(own + warp * M::kSliceBytes);
    if constexpr (kGradK) v.Begin(own + S::kOwnHalfBytes + warp * M::kSliceBytes);

    QueryCursor<kQueries> cursor(p, first_row, count, kv_head);
    auto load = [&](int stage) {
      const bool exists = cursor.Next(p);
      cursor.Describe(p, exists, infos[stage]);
      if (exists) {
        const uint32_t to = stages + stage * S::kStageBytes;
        StartRows<T, kDims, kQueries>(p.q, cursor.token(), cursor.count(), cursor.head(),
                                      p.head_size, to);
        StartRows<T, kDims, kQueries>(p.grad_out, cursor.token(), cursor.count(), cursor.head(),
                                      p.v_head_size, to + S::kHalfBytes);
      }
      CommitCopies();
    };
    load(0);
    load(1);
    Columns<kDims> grad_k, grad_v;
    SetZero<kDims>(grad_k);
    SetZero<kDims>(grad_v);
    for (int stage = 0;; stage ^= 1) {
      WaitCopies<kTileStages - 1>();
      __syncthreads();
      const auto& info = infos[stage];
      if (!info.exists) break;
      const int begin = warp * kSliceRows, end = begin + kSliceRows;
      if (info.some.begin < end && info.some.end > begin) {
        const uint32_t q = stages + stage * S::kStageBytes, grad_out = q + S::kHalfBytes;
        Columns<kQueries> dots, grads;
        SetZero<kQueries>(dots);
        SetZero<kQueries>(grads);
        M::template AddDots<kQueries>(dots, k, q, p.head_size);
        if constexpr (kGradK) M::template AddDots<kQueries>(grads, v, grad_out, p.v_head_size);
        const bool masked = info.all.begin > begin || info.all.end < end;
        Weigh<kGradK, kQueries>(p, QueryColumns<kQueries>(info), info.slope, masked, dots, grads);
        if constexpr (kGradV)
          M::template AddProduct<kQueries>(grad_v, dots, grad_out, p.v_head_size, masked);
        if constexpr (kGradK)
          M::template AddProduct<kQueries>(grad_k, grads, q, p.head_size, masked);
      }
      __syncthreads();
      load(stage);
    }
    WaitCopies<0>();
    if constexpr (kGradK) {
      M::StoreRows(p.grad_k, first_row, count, kv_head, p.head_size, p.softmax_scale, grad_k);
    }
    if constexpr (kGradV) {
      M::StoreRows(p.grad_v, first_row, count, kv_head, p.v_head_size, 1.f, grad_v);
    }
    __syncthreads();
  }
}

// Why the kernels cannot serve a call, whatever its dtype; "" if they can.
inline const char* WhyNoTiles(const Problem& p) {
  if (p.LargerHeadSize() > attention::kMaxUsualHeadSize) {
    return "head sizes above 256 need CUDA cores";
  }
  if (!p.vectors) return "strides or addresses are not multiples of 16 bytes";
  return "";
}

// Thread blocks for a number of items. Where it is likely that there is nothing to do, few, each of
// which takes several items.
inline unsigned TileBlocks(const Problem& p, int64_t items) {
  const int64_t most = p.only_shared ? 2 * NumMultiprocessors() : INT32_MAX;
  return static_cast<unsigned>(std::min(items, most));
}

inline void LaunchTileKernel(void (*kernel)(Problem), const Problem& p, int64_t items, int bytes,
                             cudaStream_t stream) {
  if (items == 0) return;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  kernel<<<TileBlocks(p, items), kTileThreads, bytes, stream>>>(p);
}

template <typename T, int kDims>
void LaunchTileKernels(const Problem& p, cudaStream_t stream) {
  const int64_t row_items = int64_t{p.plan.num_row_tiles} * p.num_heads;
  const int64_t key_items = (int64_t{p.num_keys} + kOwnRows - 1) / kOwnRows * p.num_kv_heads;
  using M = TileProducts<T, kDims>;
  constexpr int kRowBytes = TileShared<M, M::kOwnInRegisters>::kBytes;
  constexpr int kKeyBytes = KeyTile<T, kDims>::kBytes;
  LaunchTileKernel(GradQKernel<T, kDims>, p, row_items, kRowBytes, stream);
  if constexpr (kDims <= 128) {
    LaunchTileKernel(GradKVKernel<T, kDims, true, true>, p, key_items, kKeyBytes, stream);
  } else {  // the sums of both do not fit a warp's registers
    LaunchTileKernel(GradKVKernel<T, kDims, true, false>, p, key_items, kKeyBytes, stream);
    LaunchTileKernel(GradKVKernel<T, kDims, false, true>, p, key_items, kKeyBytes, stream);
  }
}

}  // namespace flashxla::attention_backward

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_TILE_KERNELS_CUH_
