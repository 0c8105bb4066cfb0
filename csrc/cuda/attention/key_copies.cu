#include <algorithm>

#include "common/round_up.h"
#include "common/tensor_view.h"
#include "cuda/attention/dispatch.cuh"
#include "cuda/attention/dtypes.cuh"
#include "cuda/attention/engines.h"
#include "cuda/attention/key_copies.h"
#include "cuda/attention/plan_sequences.cuh"
#include "cuda/attention/tensor_map.h"
#include "cuda/launch.h"

namespace flashxla::attention {
namespace {

constexpr int kThreads = 256;
// Keys that a thread block copies at a time.
constexpr int kKeys = 8;
// A sequence's copies begin at a multiple of this. No kv tile has more keys.
constexpr int kMostTileKeys = 128;
constexpr int kVectorElements = 8;  // of 16 bits

enum class Source { kSame, kE4m3, kE5m2 };

// Keys or values.
struct CopiedTensor {
  Cache from;
  char* to;
  int32_t unit;  // bytes that are loaded at a time
  FastDivide vectors_of_head, vectors_of_token;
};

struct KeyCopies {
  CopiedTensor k, v;
  int32_t* table;  // the block of each sequence's copies; null: dense
  int64_t num_items;
  FastDivide items_of_sequence;
  IndexTensors index;
  RoleRules roles;
  Role role;
  Window window;
  int32_t group_size;
};

// The keys of a sequence of which there are copies, and the rows that are written.
struct CopiedKeys {
  int32_t num_keys = 0, first_seen = 0;
  KeyRange rows = {0, 0};

  __device__ CopiedKeys(const KeyCopies& c, int sequence) {
    const IndexTensors& index = c.index;
    Sequence s = {};
    if (sequence >= NumSequences(index) || !ReadKeys(index, sequence, &s)) return;
    const int32_t first = At(index.cu_seqlens_q, sequence);
    const int32_t last = At(index.cu_seqlens_q, sequence + 1);
    if (!AreQueries(index, first, last) || first == last) return;
    s.first_query = first, s.num_queries = last - first;
    const KeyRange seen = VisibleKeys(s, c.window, 0, s.num_queries - 1);
    if (RoleOf(c.roles, c.group_size, s, seen) != c.role) return;
    num_keys = s.num_keys, first_seen = seen.begin;
    rows.begin = max(seen.begin - kMostTileKeys, 0);
    rows.end = static_cast<int32_t>(
        min(int64_t{num_keys} + kMostTileKeys, int64_t{c.items_of_sequence.divisor} * kKeys));
  }

  // Whether all pages exist that a query sees. All threads of the block must call it.
  __device__ bool AllExist(const BlockTable& table, int sequence) const {
    if (num_keys == 0) return true;
    const unsigned size = table.block_size;
    const PageRange pages = {first_seen / size, (num_keys - 1) / size + 1};
    return !__syncthreads_or(HasUnsoundPage(table, sequence, pages, threadIdx.x, kThreads));
  }
};

// Eight elements as they are in memory, at any address; zeros for those that the head does not
// have. unit: as CopiedTensor has it.
template <typename Element>
__device__ void LoadEight(const char* from, int64_t stride, int unit, int count,
                          uint32_t (&x)[2 * sizeof(Element)]) {
  constexpr int kWords = 2 * sizeof(Element), kOfWord = 4 / sizeof(Element);
#pragma unroll
  for (int i = 0; i < kWords; ++i) x[i] = 0;
  if (unit == 8 * sizeof(Element)) {
    using Vector = std::conditional_t<sizeof(Element) == 1, uint2, uint4>;
    reinterpret_cast<Vector&>(x) = *reinterpret_cast<const Vector*>(from);
  } else if (unit >= 4) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (i * kOfWord < count) x[i] = reinterpret_cast<const uint32_t*>(from)[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) {
      const auto* at = reinterpret_cast<const Element*>(from) + i * stride;
      const auto* bytes = reinterpret_cast<const uint8_t*>(at);
      uint32_t element = 0;
      if (i < count) element = unit == 1 && sizeof(Element) == 2 ? bytes[0] | bytes[1] << 8 : *at;
      x[i / kOfWord] |= element << i % kOfWord * 8 * sizeof(Element);
    }
  }
}

// Vectors of keys, or of values, that a thread has at a time: their loads are in flight together.
constexpr int kAtOnce = 4;

// Loads a thread's vectors of a thread block's rows, of which `places` has the block and the token:
// number `first`, and each kThreads-th after it.
template <typename T, Source kSource>
__device__ void LoadVectors(const CopiedTensor& t, const int2* places, int first, int count,
                            uint4 (&vectors)[kAtOnce]) {
  using Element = std::conditional_t<kSource == Source::kSame, uint16_t, uint8_t>;
  const int of_token = t.vectors_of_token.divisor, of_head = t.vectors_of_head.divisor;
#pragma unroll
  for (int n = 0; n < kAtOnce; ++n) {
    const int i = first + n * kThreads;
    uint32_t y[4] = {};
    const int row = t.vectors_of_token.Quotient(i), of_row = i - row * of_token;
    const int head = t.vectors_of_head.Quotient(of_row);
    const int2 place = row < count ? places[row] : make_int2(-1, 0);
    if (place.x >= 0) {
      const int dim = (of_row - head * of_head) * kVectorElements;
      const int64_t at = place.x * t.from.stride_block + place.y * t.from.stride_token +
                         head * t.from.stride_head + dim * t.from.stride_dim;
      uint32_t x[2 * sizeof(Element)];
      LoadEight<Element>(t.from.data + at * int{sizeof(Element)}, t.from.stride_dim, t.unit,
                         t.from.head_size - dim, x);
      if constexpr (kSource == Source::kSame) {
#pragma unroll
        for (int j = 0; j < 4; ++j) y[j] = x[j];
      } else {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          WidenTo<T, kSource == Source::kE5m2>(x[j], &y[2 * j], &y[2 * j + 1]);
        }
      }
    }
    vectors[n] = make_uint4(y[0], y[1], y[2], y[3]);
  }
}

// Stores them, from row `first_row` of the copies on.
__device__ void StoreVectors(const CopiedTensor& t, int64_t first_row, int first, int count,
                             const uint4 (&vectors)[kAtOnce]) {
  const int of_token = t.vectors_of_token.divisor;
  auto* const to = reinterpret_cast<uint4*>(t.to) + first_row * of_token;
#pragma unroll
  for (int n = 0; n < kAtOnce; ++n) {
    const int i = first + n * kThreads;
    if (i < count * of_token) to[i] = vectors[n];
  }
}

// T: what fp8 becomes.
template <typename T, Source kSource>
__global__ void __launch_bounds__(kThreads) KeyCopiesKernel(const __grid_constant__ KeyCopies c) {
  __shared__ int2 places[kKeys];
  WaitForPrevious();
  for (int64_t item = blockIdx.x; item < c.num_items; item += gridDim.x) {
    const bool paged = c.table != nullptr;
    const int of_sequence = static_cast<int>(c.items_of_sequence.divisor);
    const int sequence = paged ? c.items_of_sequence.Quotient(static_cast<uint32_t>(item)) : 0;
    const int first = static_cast<int>(item - int64_t{sequence} * of_sequence) * kKeys;
    int count = min(kKeys, c.index.block_table.block_size - first);  // of dense keys
    if (paged) {
      const CopiedKeys keys(c, sequence);
      if (first == 0) {
        const bool exist = keys.AllExist(c.index.block_table, sequence);
        if (threadIdx.x == 0) c.table[sequence] = exist ? sequence : -1;
      }
      count = kKeys;
      if (first + kKeys <= keys.rows.begin || first >= keys.rows.end) continue;
      if (threadIdx.x < kKeys) {
        const int key = first + threadIdx.x, size = c.index.block_table.block_size;
        int2 place = {-1, 0};
        if (key < keys.num_keys) {
          const int page = key / size, block = Entry(c.index.block_table, sequence, page);
          if (IsSound(c.index.block_table, block)) place = {block, key - page * size};
        }
        places[threadIdx.x] = place;
      }
    } else if (threadIdx.x < kKeys) {
      places[threadIdx.x] = {0, first + static_cast<int>(threadIdx.x)};
    }
    __syncthreads();
    const int num_vectors = count * max(c.k.vectors_of_token.divisor, c.v.vectors_of_token.divisor);
    for (int i = threadIdx.x; i < num_vectors; i += kAtOnce * kThreads) {
      uint4 k[kAtOnce], v[kAtOnce];
      LoadVectors<T, kSource>(c.k, places, i, count, k);
      LoadVectors<T, kSource>(c.v, places, i, count, v);
      StoreVectors(c.k, item * kKeys, i, count, k);
      StoreVectors(c.v, item * kKeys, i, count, v);
    }
    __syncthreads();
  }
  TriggerNext();  // at the end: the next kernel is large
}

bool IsPaged(const Problem& p) { return p.block_table.data != nullptr; }

// Rows of the copies.
int64_t NumRows(const Problem& p) {
  if (!IsPaged(p)) return p.block_table.block_size;
  return p.index.num_sequences * RoundUp(p.index.capacity, kMostTileKeys);
}

// Keys and values of products of e4m3 stay as they are.
bool AreKept(const Problem& p) {
  return p.q_dtype == FLASHXLA_F8E4M3 && p.kv_dtype == FLASHXLA_F8E4M3;
}

// Elements of the copies in a vector.
int64_t PerVector(const Problem& p) { return AreKept(p) ? 16 : kVectorElements; }

// Vectors of a copied head.
int64_t VectorsOf(const Problem& p, const Cache& c) {
  return (c.head_size + PerVector(p) - 1) / PerVector(p);
}

int64_t BytesOf(const Problem& p, const Cache& c) {
  return NumRows(p) * p.num_kv_heads * VectorsOf(p, c) * 16;
}

// Pairs of fp8 numbers, as if they were elements of 16 bits. The heads must be of whole vectors.
Cache PairsOf(const Cache& c) {
  return {c.data,       c.stride_block / 2, c.stride_token / 2, c.stride_head / 2,
          c.stride_dim, c.head_size / 2};
}

CopiedTensor TensorOf(const Problem& p, const Cache& given, const Cache& to) {
  const Cache from = AreKept(p) ? PairsOf(given) : given;
  const int64_t size = AreKept(p) ? 2 : ElementSize(p.kv_dtype), vectors = VectorsOf(p, given);
  const int64_t unit = std::min(UnitOf(from, size, AddressOf(from.data)), size * kVectorElements);
  return {from, const_cast<char*>(to.data), static_cast<int32_t>(unit), FastDivide(vectors),
          FastDivide(vectors * p.num_kv_heads)};
}

// Whether heads begin and end at multiples of 16 bytes.
bool HaveVectors(const Problem& p) {
  const int64_t size = ElementSize(p.kv_dtype);
  return UnitOf(p.k, size, 0) == 16 && UnitOf(p.v, size, 0) == 16;
}

// Whether TMA could load keys and values as they are.
bool AreLoadable(const Problem& p) { return KeysOfBox(p, 8) == 8 && HaveVectors(p); }

}  // namespace

bool CopiesKeys(const Problem& p) {
  const int64_t sequences = p.index.num_sequences, tokens = p.num_tokens;
  if (p.batch_invariant || WhyNot16BitDtypes(p)[0] != '\0' || WhyNoKeys(p)[0] != '\0' ||
      sequences == 0) {
    return false;
  }
  const bool loadable = AreLoadable(p), kept = AreKept(p);
  if (loadable && (kept || !IsFp8(p.kv_dtype))) return false;  // copies would be the same
  if (kept ? !HaveVectors(p) || HasLargeHeads(p) : IsFp8(p.q_dtype)) return false;
  // A key is copied in the time that conversion takes for so many rows.
  const int64_t least_rows = loadable && p.LargerHeadSize() <= 128 ? 2048 : 1536;
  if (tokens * p.group_size < least_rows * sequences) return false;
  // One more kernel costs some microseconds, which small calls do not save; those of large heads
  // do.
  constexpr double kLeastProducts = 6e9;
  const double products = static_cast<double>(tokens) * tokens / sequences * p.num_heads *
                          (p.k.head_size + p.v.head_size);
  if (!HasLargeHeads(p) && products < kLeastProducts) return false;
  // Tables may have room for far more keys than there are.
  const int64_t most =
      2 * ElementSize(p.q_dtype) * tokens * p.num_heads * (p.k.head_size + p.v.head_size);
  return NumRows(p) <= INT32_MAX && BytesOf(p, p.k) + BytesOf(p, p.v) <= most;
}

int64_t KeyCopiesBytes(const Problem& p) {
  if (!CopiesKeys(p)) return 0;
  return BytesOf(p, p.k) + BytesOf(p, p.v) +
         RoundUp(p.index.num_sequences * int64_t{sizeof(int32_t)}, 16);
}

Problem OnKeyCopies(const Problem& p, void* memory) {
  if (!CopiesKeys(p)) return p;
  alignas(16) static char nowhere[16];
  char* at = memory != nullptr ? static_cast<char*>(memory) : nowhere;
  Problem copied = p;
  const int64_t page = IsPaged(p) ? RoundUp(p.index.capacity, kMostTileKeys) : NumRows(p);
  auto place = [&](Cache* c) {
    const int64_t bytes = BytesOf(p, *c), head = VectorsOf(p, *c) * PerVector(p);
    c->data = at, c->stride_dim = 1, c->stride_head = head;
    c->stride_token = head * p.num_kv_heads, c->stride_block = page * c->stride_token;
    if (memory != nullptr) at += bytes;
  };
  place(&copied.k), place(&copied.v);
  if (!AreKept(p)) copied.kv_dtype = p.out_dtype;
  copied.kv_unit = 16, copied.kv_near = true;
  BlockTable& table = copied.block_table;
  if (IsPaged(p)) {
    table = {reinterpret_cast<const int32_t*>(at),
             1,
             0,
             p.index.num_sequences,
             p.index.num_sequences,
             static_cast<int32_t>(page)};
    copied.block_shift = -1;
  }
  return copied;
}

Problem MakeKeyCopies(const Problem& p, Role role, void* memory, cudaStream_t stream) {
  const Problem copied = OnKeyCopies(p, memory);
  KeyCopies c = {};
  c.k = TensorOf(p, p.k, copied.k), c.v = TensorOf(p, p.v, copied.v);
  if (IsPaged(p)) c.table = const_cast<int32_t*>(copied.block_table.data);
  c.num_items = (NumRows(p) + kKeys - 1) / kKeys;
  c.items_of_sequence = FastDivide(IsPaged(p) ? copied.block_table.block_size / kKeys : 1);
  c.index = p.index, c.roles = p.roles, c.role = role;
  c.window = p.window, c.group_size = p.group_size;
  const int blocks = static_cast<int>(std::min<int64_t>(c.num_items, 8ll * NumMultiprocessors()));
  auto launch = [&](auto* kernel) { LaunchDependent(kernel, blocks, kThreads, 0, stream, c); };
  const bool e5m2 = p.kv_dtype == FLASHXLA_F8E5M2;
  if (!IsFp8(p.kv_dtype) || AreKept(p)) {
    launch(KeyCopiesKernel<__half, Source::kSame>);
  } else if (p.out_dtype == FLASHXLA_F16) {
    launch(e5m2 ? KeyCopiesKernel<__half, Source::kE5m2> : KeyCopiesKernel<__half, Source::kE4m3>);
  } else {
    launch(e5m2 ? KeyCopiesKernel<__nv_bfloat16, Source::kE5m2>
                : KeyCopiesKernel<__nv_bfloat16, Source::kE4m3>);
  }
  return copied;
}

}  // namespace flashxla::attention
