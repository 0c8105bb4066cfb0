// The work item of the engines on CUDA cores, a q tile of one KV head, and loading its queries and
// keys.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_SIMT_ITEM_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_SIMT_ITEM_CUH_

#include "cuda/attention/dtypes.cuh"
#include "cuda/attention/mma.cuh"
#include "cuda/attention/problem.cuh"
#include "cuda/attention/warp.cuh"

namespace flashxla::attention {

// What a row sees; in shared memory. Rows past the last one see nothing.
struct SimtRow {
  int begin, end;  // keys
  int diagonal;    // its position among the keys
  float slope;     // ALiBi
};

struct SimtItem {
  PlannedSequence s;
  int index, kv_head;
  int first_row, num_rows;  // a row is a query token of one head
  int begin, end;           // keys that at least one row sees
  int begin_all, end_all;   // keys that all rows see
  float scale;              // factor of the dot products; includes log2(e) if plain
  bool plain;               // no softcap, no ALiBi

  // At most `most_rows` rows of a sequence.
  __device__ SimtItem(const Problem& p, const PlannedSequence& sequence, int sequence_index,
                      int head, int first, int most_rows)
      : s(sequence), index(sequence_index), kv_head(head), first_row(first) {
    num_rows = min(most_rows, s.num_queries * p.group_size - first_row);
    const int first_query = Query(p, 0), last_query = Query(p, num_rows - 1);
    const KeyRange keys = p.Visible(s, first_query, last_query);
    begin = keys.begin, end = keys.end;
    begin_all = p.Visible(s, last_query).begin, end_all = p.Visible(s, first_query).end;
    plain = p.softcap <= 0.f && p.alibi_slopes.data == nullptr;
    scale = p.ScoreScale(index, kv_head) * (plain ? kLog2e : 1.f);
  }

  // Tile `tile` of the list for the rest. All lanes of a warp must call it.
  __device__ static SimtItem OfRest(const Problem& p, int tile, int head) {
    const int index = FindStart(p.plan.rest_starts, p.plan.num_sequences, tile);
    const int first = (tile - p.plan.rest_starts[index]) * kRestQTileRows;
    return SimtItem(p, p.plan.sequences[index], index, head, first, kRestQTileRows);
  }

  __device__ int Query(const Problem& p, int row) const {
    return static_cast<int>(p.by_group_size.Quotient(first_row + row));
  }
  __device__ int Token(const Problem& p, int row) const { return s.first_query + Query(p, row); }
  __device__ int Head(const Problem& p, int row) const {
    return kv_head * p.group_size + (first_row + row) - Query(p, row) * p.group_size;
  }

  __device__ SimtRow Row(const Problem& p, int row) const {
    SimtRow r = {0, 0, 0, 0.f};
    if (row >= num_rows) return r;
    const int query = Query(p, row);
    const KeyRange keys = p.Visible(s, query);
    r.begin = keys.begin, r.end = keys.end;
    r.diagonal = query - s.num_queries + s.length;
    r.slope = p.alibi_slopes.at(index, Head(p, row), 0.f);
    return r;
  }

  // The score (log2) of a row and a key that it sees, from their dot product, if `plain`. Rounded,
  // so that it is the same whatever is computed from it.
  __device__ float PlainScore(float dot) const { return __fmul_rn(dot, scale); }

  // The score (log2) of a row and key j, from their dot product; -inf if the row does not see j.
  __device__ float Score(const Problem& p, const SimtRow& row, int j, bool exists,
                         float dot) const {
    float x = PlainScore(dot);
    if (!plain) x = p.Score(x, row.slope, int64_t{row.diagonal} - j) * kLog2e;
    return exists && j >= row.begin && j < row.end ? x : -INFINITY;
  }

  // The element offsets of key j in the keys and in the values. False if it does not exist, or no
  // row sees it.
  __device__ bool Find(const Problem& p, int j, int64_t* k, int64_t* v) const {
    int block = 0, token = 0;
    if (j < begin || j >= end || !p.Locate(s, index, j, &block, &token)) return false;
    *k = block * p.k.stride_block + token * p.k.stride_token + kv_head * p.k.stride_head;
    *v = block * p.v.stride_block + token * p.v.stride_token + kv_head * p.v.stride_head;
    return true;
  }
};

// Loads the item's first `num_rows` rows of queries into shared memory, kStride floats apart; zeros
// past the head size and past the item's rows. A warp takes a row. kAsync: WaitCopies waits for it.
template <int kDims, int kStride, bool kAsync = false>
__device__ void LoadQueries(const Problem& p, const SimtItem& item, int num_rows, float* q) {
  const int lane = threadIdx.x % 32, num_warps = blockDim.x / 32;
#pragma unroll 4
  for (int row = threadIdx.x / 32; row < num_rows; row += num_warps) {
    const auto* from = reinterpret_cast<const float*>(p.q.data);
    if (row < item.num_rows) {
      from += item.Token(p, row) * p.q.stride_token + item.Head(p, row) * p.q.stride_head;
    }
#pragma unroll
    for (int d = lane; d < kDims; d += 32) {
      const bool exists = row < item.num_rows && d < p.k.head_size;
      float* to = q + row * kStride + d;
      if constexpr (kAsync) {
        CopyAsync<4>(SharedAddress(to), from + d * p.q.stride_dim, exists);
      } else {
        *to = exists ? from[d * p.q.stride_dim] : 0.f;
      }
    }
  }
}

// Dims [d, d + 4) of the key or value that starts at `offset`; zeros past the head size.
template <bool kFp8>
__device__ float4 LoadFour(const Problem& p, const Cache& c, int64_t offset, int d) {
  const bool e5m2 = p.kv_dtype == FLASHXLA_F8E5M2;
  if (p.kv_vectors()) {  // which implies that the head size is a multiple of four
    if (d >= c.head_size) return make_float4(0.f, 0.f, 0.f, 0.f);
    if constexpr (kFp8) {
      const uint32_t bits = *reinterpret_cast<const uint32_t*>(c.data + offset + d);
      const float2 low = DecodeFp8x2(static_cast<uint16_t>(bits), e5m2);
      const float2 high = DecodeFp8x2(static_cast<uint16_t>(bits >> 16), e5m2);
      return make_float4(low.x, low.y, high.x, high.y);
    } else {
      return *reinterpret_cast<const float4*>(c.data + (offset + d) * 4);
    }
  }
  auto load = [&](int i) {
    if (i >= c.head_size) return 0.f;
    const int64_t at = offset + i * c.stride_dim;
    if constexpr (kFp8) {
      return DecodeFp8(reinterpret_cast<const uint8_t*>(c.data)[at], e5m2);
    } else {
      return reinterpret_cast<const float*>(c.data)[at];
    }
  };
  return make_float4(load(d), load(d + 1), load(d + 2), load(d + 3));
}

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_SIMT_ITEM_CUH_
