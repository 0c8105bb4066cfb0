// The plan: one block reads the index tensors once, and lists the engines' work.
#include "cuda/attention/engines.h"
#include "cuda/attention/plan.cuh"

namespace flashxla::attention {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
// Above this many wide tiles they keep their order: there are enough to fill the GPU evenly.
constexpr int kMaxSorted = 2048;
// Fewer queries than this leave most of a wide tile empty.
constexpr int kMinWideQueries = 48;

// A one-dimensional index tensor; null data: absent.
struct Index {
  const int32_t* data;
  int64_t stride;

  __device__ int operator[](int64_t i) const { return data[i * stride]; }
};

struct PlanProblem {
  Index cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, num_seqs;
  const int32_t* block_table;
  int64_t table_stride_sequence, table_stride_page;
  int64_t capacity;  // keys that a table row, or the dense tensor, can hold
  int32_t num_sequences, num_tokens, group_size, num_blocks, block_size;
  int32_t window_left, window_right;
  int64_t engines;
  int32_t* plan;
};

// Two of each: a sum writes into one set while slow threads still read the sum before from the
// other.
struct ScanMemory {
  int32_t partial[2][kWarps];
  unsigned flags[2][kWarps];
};

// Sums over the threads of the block, which all call it.
struct Scan {
  ScanMemory& shared;
  int turn = 0;

  // The sum of `value` over the threads before this one; *total is that over all, *any whether a
  // thread has the flag.
  __device__ int Exclusive(int value, int* total, bool flag = false, bool* any = nullptr) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    int32_t* partial = shared.partial[turn];
    unsigned* flags = shared.flags[turn];
    turn ^= 1;
    int sum = value;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) partial[warp] = sum;
    const unsigned flagged = any == nullptr ? 0 : __ballot_sync(~0u, flag);
    if (any != nullptr && lane == 0) flags[warp] = flagged;
    __syncthreads();
    if (warp == 0) {
      int all = partial[lane];
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, all, step);
        if (lane >= step) all += other;
      }
      partial[lane] = all;
      if (any != nullptr) flags[lane] = __any_sync(~0u, flags[lane] != 0);
    }
    __syncthreads();
    *total = partial[kWarps - 1];
    if (any != nullptr) *any = flags[0] != 0;
    return sum - value + (warp == 0 ? 0 : partial[warp - 1]);
  }
};

// The keys of sequence i, whose queries are known. False: it is skipped.
__device__ bool ReadKeys(const PlanProblem& p, int i, Sequence* s) {
  int64_t capacity = p.capacity;
  s->key_row = 0;
  if (p.block_table == nullptr) {
    const int begin = p.cu_seqlens_k[i], end = p.cu_seqlens_k[i + 1];
    if (begin < 0 || end < begin || end > p.capacity) return false;
    s->key_row = begin;
    // seqused_k gives the length, cu_seqlens_k only the start then.
    capacity = p.seqused_k.data ? p.capacity - begin : end - begin;
  }
  s->length = p.seqused_k.data ? p.seqused_k[i] : static_cast<int>(capacity);
  if (s->length < 0) return false;
  s->num_keys = static_cast<int>(min(int64_t{s->length}, capacity));
  s->first_key = p.leftpad_k.data ? min(max(p.leftpad_k[i], 0), s->num_keys) : 0;
  return true;
}

// The keys [*begin, *end) that some of queries [first, last] see.
__device__ void VisibleToAny(const PlanProblem& p, const Sequence& s, int first, int last,
                             int* begin, int* end) {
  const int64_t offset = int64_t{s.length} - s.num_queries;
  int64_t low = s.first_key, high = s.num_keys;
  if (p.window_left >= 0) low = max(low, first + offset - p.window_left);
  if (p.window_right >= 0) high = min(high, last + offset + p.window_right + 1);
  *begin = static_cast<int>(min(low, int64_t{s.num_keys}));
  *end = static_cast<int>(max(high, int64_t{0}));
}

// Sequences with more queries than this are too long for one thread to look after.
constexpr int kMinLong = 32;
static_assert(kMinLong < kMinWideQueries);

// What the lists of long sequences need of one.
struct LongSequence {
  int32_t index, first_query, num_queries, num_keys;
  int32_t first_tile;  // of its wide tiles
  Engine engine;
};

// The first sequences are kept in shared memory, too: the way to global memory and back is long.
constexpr int kMaxKept = 384;
constexpr int kMaxKeptLong = 512;

struct Shared {
  ScanMemory scan;
  Sequence kept[kMaxKept];
  int32_t split_starts[kMaxKept];
  LongSequence kept_long[kMaxKeptLong];
  int32_t cost[kMaxSorted];
  unsigned unsound;  // of the sequences whose tables are being checked
};

struct SequenceTable {
  Sequence* plan;
  Sequence* kept;

  __device__ Sequence Get(int i) const { return i < kMaxKept ? kept[i] : plan[i]; }
  __device__ void Set(int i, const Sequence& s) const {
    plan[i] = s;
    if (i < kMaxKept) kept[i] = s;
  }
  __device__ void SetEngine(int i, Engine engine) const {
    plan[i].engine = engine;
    if (i < kMaxKept) kept[i].engine = engine;
  }
  __device__ void SetFirstTile(int i, int tile) const {
    plan[i].first_tile = tile;
    if (i < kMaxKept) kept[i].first_tile = tile;
  }
};

// The long sequences, in their order. Sequences that are not kept are read from the plan.
struct LongList {
  SequenceTable sequences;
  int32_t* places;  // in the plan: the sequence of each place
  LongSequence* kept;
  int size;
  bool has_huge;  // sequences of more queries than there are threads

  __device__ LongSequence operator[](int n) const {
    return n < kMaxKeptLong ? kept[n] : Of(places[n], sequences.plan[places[n]]);
  }
  __device__ void Set(int n, int i, const Sequence& s) const {
    places[n] = i;
    if (n < kMaxKeptLong) kept[n] = Of(i, s);
  }
  __device__ void SetEngine(int n, Engine engine) const {
    if (n < kMaxKeptLong) kept[n].engine = engine;
    sequences.SetEngine(places[n], engine);
  }
  __device__ void SetFirstTile(int n, int tile) const {
    if (n < kMaxKeptLong) kept[n].first_tile = tile;
    sequences.SetFirstTile(places[n], tile);
  }

 private:
  __device__ static LongSequence Of(int i, const Sequence& s) {
    return {i,          s.first_query, s.num_queries,
            s.num_keys, s.first_tile,  static_cast<Engine>(s.engine)};
  }
};

// Offsets that do not only grow: a sequence is sound if it starts behind all sound ones before it.
// num_queries of the others becomes 0. One warp finds out, 32 sequences at a time: where each
// starts at the end of the one before, all that follow a sound one are sound as far as the offsets
// grow.
__device__ void ReadUnsoundQueries(const PlanProblem& p, int num_sequences, Sequence* sequences) {
  const int lane = threadIdx.x & 31;
  int previous = 0;  // the end of the sound ones so far
#pragma unroll 1
  for (int base = 0; base < num_sequences; base += 32) {
    const int i = base + lane;
    int begin = 0, end = -1;
    if (i < num_sequences) begin = p.cu_seqlens_q[i], end = p.cu_seqlens_q[i + 1];
    const bool grows = begin >= 0 && begin <= end && end <= p.num_tokens;
    const unsigned growing = __ballot_sync(~0u, grows);
    unsigned left = growing, sound = 0;
#pragma unroll 1
    while (const unsigned next = __ballot_sync(~0u, begin >= previous) & left) {
      const int first = __ffs(next) - 1;
      const unsigned stops = ~growing >> first << first;  // from `first` on
      const int last = stops ? __ffs(stops) - 2 : 31;
      const unsigned run = ~0u >> (31 - last) >> first << first;
      sound |= run;
      left &= ~(~0u >> (31 - last));
      previous = __shfl_sync(~0u, end, last);
    }
    if (i < num_sequences) sequences[i].num_queries = (sound >> lane) & 1 ? end - begin : 0;
  }
}

// Reads the queries of every sequence. Returns whether their offsets only grow, as they should;
// otherwise num_queries says which are sound.
__device__ bool ReadQueries(const PlanProblem& p, int num_sequences, Sequence* sequences) {
  bool grows = true;
#pragma unroll 1
  for (int i = threadIdx.x; i < num_sequences; i += kThreads) {
    const int begin = p.cu_seqlens_q[i], end = p.cu_seqlens_q[i + 1];
    grows = grows && begin >= 0 && begin <= end && end <= p.num_tokens;
  }
  if (__syncthreads_and(grows)) return true;
  if (threadIdx.x < 32) ReadUnsoundQueries(p, num_sequences, sequences);
  __syncthreads();
  return false;
}

// Divides the `total` steps of kSplit evenly among its blocks. starts[i]: the steps before sequence
// i.
__device__ void ListSplit(const PlanProblem& p, const SequenceTable& sequences,
                          const int32_t* starts, int total, SplitBlock* blocks) {
  const int num_blocks = SplitBlocksOf(p.engines);
  const int share = max((total + num_blocks - 1) / num_blocks, 1);
#pragma unroll 1
  for (int b = threadIdx.x; b < num_blocks; b += kThreads) {
    const int first = b * share;
    if (first >= total) {
      blocks[b].begin = blocks[b].end = 0;
      continue;
    }
    int i = 0, high = p.num_sequences;  // the last with starts[i] <= first
#pragma unroll 1
    while (high - i > 1) {
      const int middle = (i + high) / 2;
      if (starts[middle] <= first) {
        i = middle;
      } else {
        high = middle;
      }
    }
    const Sequence s = sequences.Get(i);
    const int row_tile = (first - starts[i]) / s.num_steps;
    blocks[b] = {first,
                 min(first + share, total),
                 i,
                 row_tile * kSplitRows,
                 starts[i] + row_tile * s.num_steps,
                 {},
                 s};
  }
}

// Calls body(sequence, first, step) for the long sequences: the threads that call it for one share
// its items [first, first + step, ...). A warp a sequence, and all threads for a huge one.
template <typename Body>
__device__ void ForEachLong(const LongList& list, Body&& body) {
#pragma unroll 1
  for (int n = threadIdx.x / 32; n < list.size; n += kWarps) {
    const LongSequence s = list[n];
    if (s.num_queries <= kThreads) body(s, threadIdx.x & 31, 32);
  }
  if (!list.has_huge) return;
#pragma unroll 1
  for (int n = 0; n < list.size; ++n) {
    const LongSequence s = list[n];
    if (s.num_queries > kThreads) body(s, threadIdx.x, kThreads);
  }
}

__device__ int WideTiles(int engine, int num_queries) {
  return engine == kWide ? (num_queries + kWideQueries - 1) / kWideQueries : 0;
}

// kWide reads pages by number, unchecked: a sequence with an unsound one goes to kTile.
__device__ void CheckTables(const PlanProblem& p, Shared& shared, const LongList& list) {
  constexpr int kAtOnce = 8;  // sequences, so that their loads wait together
  if (threadIdx.x == 0) shared.unsound = 0;
  __syncthreads();
#pragma unroll 1
  for (int base = 0; base < list.size; base += kAtOnce) {
    bool more = true;
#pragma unroll 1
    for (int page = threadIdx.x; more; page += kThreads) {
      more = false;
      int block[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        block[n] = 0;
        if (base + n >= list.size) continue;
        const LongSequence s = list[base + n];
        const int pages = s.engine == kWide ? (s.num_keys - 1) / p.block_size + 1 : 0;
        if (page < pages) {
          block[n] =
              __ldg(p.block_table + s.index * p.table_stride_sequence + page * p.table_stride_page);
        }
        more |= page - static_cast<int>(threadIdx.x) + kThreads < pages;
      }
      unsigned unsound = 0;
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        unsound |= (block[n] < 0 || block[n] >= max(p.num_blocks, 1)) << n;
      }
      if (unsound) atomicOr(&shared.unsound, unsound);
    }
    __syncthreads();
    if (shared.unsound == 0) continue;
    if (threadIdx.x < kAtOnce && (shared.unsound >> threadIdx.x) & 1) {
      list.SetEngine(base + threadIdx.x, kTile);
    }
    __syncthreads();
    if (threadIdx.x == 0) shared.unsound = 0;
    __syncthreads();
  }
}

// Lists the tiles of kWide, sequence after sequence.
__device__ void ListWide(const PlanProblem& p, Shared& shared, const LongList& list, int2* tiles) {
  auto list_tiles = [&](const LongSequence& l, int first, int step) {
    const Sequence s = list.sequences.Get(l.index);
    const int count = WideTiles(l.engine, l.num_queries);
#pragma unroll 1
    for (int t = first; t < count; t += step) {
      // Where they stay unsorted: the last of each sequence first, which see the most keys.
      const int tile = count - 1 - t, place = l.first_tile + t;
      tiles[place] = make_int2(l.index, tile);
      int begin, end;
      VisibleToAny(p, s, tile * kWideQueries, min((tile + 1) * kWideQueries, s.num_queries) - 1,
                   &begin, &end);
      if (place < kMaxSorted) shared.cost[place] = max(end - begin, 0);
    }
  };
  ForEachLong(list, [&](const LongSequence& l, int first, int step) {
    if (l.engine == kWide) list_tiles(l, first, step);
  });
}

// Puts the most expensive wide tiles first. Each tile counts those before it.
__device__ void SortWide(const Shared& shared, int2* tiles, int count) {
  constexpr int kEach = kMaxSorted / kThreads;
  int2 mine[kEach];
  int rank[kEach] = {};
#pragma unroll 1
  for (int n = 0; n < kEach; ++n) {
    const int k = threadIdx.x + n * kThreads;
    if (k >= count) continue;
    mine[n] = tiles[k];
    const int own = shared.cost[k];
#pragma unroll 4
    for (int j = 0; j < count; ++j) {
      rank[n] += shared.cost[j] > own || (shared.cost[j] == own && j < k);
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int n = 0; n < kEach; ++n) {
    if (static_cast<int>(threadIdx.x) + n * kThreads < count) tiles[rank[n]] = mine[n];
  }
}

// The mark of a sequence's tokens in token_sequence.
__device__ int MarkOf(int engine, int index) { return engine == kIdle ? kNoKeys : index; }

// Which sequence each token of the long ones belongs to.
__device__ void MarkLong(const LongList& list, int32_t* token_sequence) {
  ForEachLong(list, [&](const LongSequence& l, int first, int step) {
    const int mark = MarkOf(l.engine, l.index);
#pragma unroll 1
    for (int t = first; t < l.num_queries; t += step) token_sequence[l.first_query + t] = mark;
  });
}

__global__ void __launch_bounds__(kThreads) PlanKernel(const __grid_constant__ PlanProblem p) {
  __shared__ Shared shared;
  Scan scan{shared.scan};
  const int thread = threadIdx.x;
  AllowNext();
  const PlanLayout layout(p.num_sequences, p.num_tokens);
  const SequenceTable sequences{reinterpret_cast<Sequence*>(p.plan + layout.sequences()),
                                shared.kept};
  LongList long_list{sequences, p.plan + layout.long_list(), shared.kept_long, 0, false};
  int32_t* tile_starts = p.plan + layout.tile_starts();
  int32_t* split_starts = p.num_sequences < kMaxKept ? shared.split_starts : tile_starts;
  auto* wide_tiles = reinterpret_cast<int2*>(p.plan + layout.wide_tiles());
  int32_t* token_sequence = p.plan + layout.token_sequence();

  const int num_sequences =
      p.num_seqs.data ? min(max(p.num_seqs[0], 0), p.num_sequences) : p.num_sequences;
  for (int i = thread; i < p.num_tokens; i += kThreads) token_sequence[i] = kNoSequence;
  const bool grows = ReadQueries(p, num_sequences, sequences.plan);

  // Keys, engines, the list of kSplit, and which sequences are long.
  int base = 0, total;
#pragma unroll 1
  for (int i0 = 0; i0 < p.num_sequences; i0 += kThreads) {
    const int i = i0 + thread;
    Sequence s = {};
    int steps = 0;
    bool is_long = false;
    if (i < num_sequences) {
      s.first_query = p.cu_seqlens_q[i];
      s.num_queries = grows ? p.cu_seqlens_q[i + 1] - s.first_query : sequences.plan[i].num_queries;
      if (ReadKeys(p, i, &s) && s.num_queries > 0) {
        const int64_t rows = int64_t{s.num_queries} * p.group_size;
        int begin, end;
        VisibleToAny(p, s, 0, s.num_queries - 1, &begin, &end);
        if (begin >= end) {
          s.engine = kIdle;
        } else if ((p.engines & kSplitAll) ||
                   ((p.engines & kUseSplit) && rows <= MaxSplitRows(p.group_size))) {
          s.engine = kSplit;
          s.first_step = begin / kSplitKeys;
          s.num_steps = (end + kSplitKeys - 1) / kSplitKeys - s.first_step;
          steps = s.num_steps * static_cast<int>((rows + kSplitRows - 1) / kSplitRows);
        } else {
          s.engine = (p.engines & kUseWide) && s.num_queries >= kMinWideQueries ? kWide : kTile;
        }
        is_long = s.num_queries > kMinLong;
        if (!is_long) {
          const int mark = MarkOf(s.engine, i);
          for (int t = 0; t < s.num_queries; ++t) token_sequence[s.first_query + t] = mark;
        }
      }
    }
    if (i < p.num_sequences) sequences.Set(i, s);
    bool any_long, any_huge;
    int before = scan.Exclusive(steps, &total, is_long, &any_long);
    if (i < p.num_sequences) split_starts[i] = base + before;
    base += total;
    if (any_long) {
      const bool is_huge = is_long && s.num_queries > kThreads;
      before = scan.Exclusive(is_long, &total, is_huge, &any_huge);
      if (is_long) long_list.Set(long_list.size + before, i, s);
      long_list.size += total;
      long_list.has_huge |= any_huge;
    }
  }
  if (thread == 0) split_starts[p.num_sequences] = base;
  __syncthreads();
  if (p.engines & kUseSplit) {
    ListSplit(p, sequences, split_starts, base,
              reinterpret_cast<SplitBlock*>(p.plan + layout.split_blocks()));
  }
  if (long_list.size > 0) MarkLong(long_list, token_sequence);
  if (p.engines & kSplitAll) return;
  __syncthreads();
  if ((p.engines & kUseWide) && p.block_table) CheckTables(p, shared, long_list);

  int num_tiles = 0, num_wide = 0;
#pragma unroll 1
  for (int i0 = 0; i0 < p.num_sequences; i0 += kThreads) {
    const int i = i0 + thread;
    Sequence s = {};
    if (i < p.num_sequences) s = sequences.Get(i);
    const int64_t rows = int64_t{s.num_queries} * p.group_size;
    const int tiles = s.engine == kTile ? static_cast<int>((rows + kTileRows - 1) / kTileRows) : 0;
    const int before = scan.Exclusive(tiles, &total);
    if (i < p.num_sequences) tile_starts[i] = num_tiles + before;
    num_tiles += total;
  }
#pragma unroll 1
  for (int n0 = 0; n0 < long_list.size; n0 += kThreads) {
    const int n = n0 + thread;
    int tiles = 0;
    if (n < long_list.size) {
      const LongSequence l = long_list[n];
      tiles = WideTiles(l.engine, l.num_queries);
    }
    const int before = scan.Exclusive(tiles, &total);
    if (tiles > 0) long_list.SetFirstTile(n, num_wide + before);
    num_wide += total;
  }
  if (thread == 0) {
    tile_starts[p.num_sequences] = num_tiles;
    p.plan[PlanLayout::kTotals + kTile] = num_tiles;
    p.plan[PlanLayout::kTotals + kWide] = num_wide;
  }
  __syncthreads();
  if (num_wide > 0) ListWide(p, shared, long_list, wide_tiles);
  __syncthreads();
  if (num_wide > 0 && num_wide <= kMaxSorted) SortWide(shared, wide_tiles, num_wide);
}

Index IndexOf(const flashxla_tensor& t) {
  return {static_cast<const int32_t*>(t.data), t.rank > 0 ? t.stride[0] : 0};
}

}  // namespace

void LaunchPlan(const flashxla_attention_plan_args& args, cudaStream_t stream) {
  PlanProblem p = {};
  p.cu_seqlens_q = IndexOf(args.cu_seqlens_q);
  p.cu_seqlens_k = IndexOf(args.cu_seqlens_k);
  p.seqused_k = IndexOf(args.seqused_k);
  p.leftpad_k = IndexOf(args.leftpad_k);
  p.num_seqs = IndexOf(args.num_seqs);
  p.capacity = args.block_size;
  if (args.block_table.data) {
    p.block_table = static_cast<const int32_t*>(args.block_table.data);
    p.table_stride_sequence = args.block_table.stride[0];
    p.table_stride_page = args.block_table.stride[1];
    p.capacity = args.block_table.shape[1] * args.block_size;
  }
  p.num_sequences = static_cast<int32_t>(args.cu_seqlens_q.shape[0] - 1);
  p.num_tokens = static_cast<int32_t>(args.num_tokens);
  p.group_size = static_cast<int32_t>(args.num_heads / args.num_kv_heads);
  p.num_blocks = static_cast<int32_t>(args.num_blocks);
  p.block_size = static_cast<int32_t>(args.block_size);
  p.window_left = static_cast<int32_t>(args.window_left);
  p.window_right = args.causal ? 0 : static_cast<int32_t>(args.window_right);
  p.engines = args.engines;
  p.plan = static_cast<int32_t*>(args.plan.data);
  PlanKernel<<<1, kThreads, 0, stream>>>(p);
}

}  // namespace flashxla::attention
