// Makes the plan: one thread block reads the index tensors once and lists the engines' work.
#include "cuda/attention/many_parts.cuh"
#include "cuda/attention/plan.cuh"
#include "cuda/attention/plan_sequences.cuh"
#include "cuda/attention/scan.cuh"
#include "cuda/attention/warp.cuh"
#include "cuda/launch.h"

namespace flashxla::attention {
namespace {

// Of the thread block. Every instruction of a warp takes a cycle of its scheduler, so a small batch
// is planned faster by fewer threads.
constexpr int kFewThreads = 256, kThreads = kScanThreads;
__device__ int NumThreads() { return static_cast<int>(blockDim.x); }

// A sequence with more queries than this is long: several threads share its work here.
constexpr int kMinLong = 8;

// A long sequence, or one of role kMany: the part of ListedSequence that is needed here.
struct LongSequence {
  int32_t index, first_query, num_queries, first_seen, num_keys;
  int32_t first_tile;  // see ListedSequence
  int32_t role;
};

// The first sequences are also kept in shared memory, which is much faster to read than the plan.
constexpr int kMaxKept = 384;
constexpr int kMaxKeptLong = 512;

struct Shared {
  ScanMemory scan;
  ListedSequence kept[kMaxKept];
  int32_t few_starts[kMaxKept];
  LongSequence kept_long[kMaxKeptLong];
  uint32_t cost_keys[kMaxSorted];
  int32_t least_few_share;
};

struct SequenceTable {
  ListedSequence* plan;
  ListedSequence* kept;

  __device__ ListedSequence Get(int i) const { return i < kMaxKept ? kept[i] : plan[i]; }
  __device__ void Set(int i, const ListedSequence& s) const {
    plan[i] = s;
    if (i < kMaxKept) kept[i] = s;
  }
  __device__ void SetRole(int i, Role role) const {
    plan[i].role = role;
    if (i < kMaxKept) kept[i].role = role;
  }
  __device__ void SetFirstTile(int i, int tile) const {
    plan[i].first_tile = tile;
    if (i < kMaxKept) kept[i].first_tile = tile;
  }
};

// The long sequences, and those of role kMany, in order. Those that are not kept are read from the
// plan.
struct LongList {
  SequenceTable sequences;
  int32_t* places;  // in the plan: the sequence index of each entry
  LongSequence* kept;
  int size;
  bool has_huge;  // some have more queries than there are threads

  __device__ LongSequence Get(int n) const {
    return n < kMaxKeptLong ? kept[n] : Of(places[n], sequences.plan[places[n]]);
  }
  __device__ void Set(int n, int i, const ListedSequence& s) const {
    places[n] = i;
    if (n < kMaxKeptLong) kept[n] = Of(i, s);
  }
  __device__ void SetRole(int n, Role role) const {
    if (n < kMaxKeptLong) kept[n].role = role;
    sequences.SetRole(places[n], role);
  }
  __device__ void SetFirstTile(int n, int tile) const {
    if (n < kMaxKeptLong) kept[n].first_tile = tile;
    sequences.SetFirstTile(places[n], tile);
  }

 private:
  __device__ static LongSequence Of(int i, const ListedSequence& s) {
    return {i, s.first_query, s.num_queries, s.first_seen, s.num_keys, s.first_tile, s.role};
  }
};

// Checks the offsets of the queries. Returns true if they only grow, as they should. Otherwise
// fills in num_queries of every sequence, 0 for unsound ones.
__device__ bool ReadQueries(const IndexTensors& index, int num_sequences,
                            ListedSequence* sequences) {
  bool grows = true;
#pragma unroll 1
  for (int i = threadIdx.x; i < num_sequences; i += NumThreads()) {
    const int begin = At(index.cu_seqlens_q, i), end = At(index.cu_seqlens_q, i + 1);
    grows = grows && AreQueries(index, begin, end);
  }
  if (__syncthreads_and(grows)) return true;
  if (threadIdx.x < 32) ReadUnsoundQueries(index, num_sequences, sequences);
  __syncthreads();
  return false;
}

// How many of the `total` steps of few queries a thread block gets. starts[i] is the number of
// steps before sequence i. least: see LeastFewShare.
__device__ int StepsOfBlock(const PlanProblem& p, const SequenceTable& sequences,
                            const int32_t* starts, int total, int least) {
  const FewShare share(total, (total + p.few.num_blocks - 1) / p.few.num_blocks, least,
                       p.few.num_lone_blocks);
  bool alike = true;
#pragma unroll 1
  for (int i = threadIdx.x; i < p.index.num_sequences; i += NumThreads()) {
    const bool is_padding = starts[i] == total;
    alike = alike && (is_padding || starts[i + 1] - starts[i] == starts[1]);
  }
  return __syncthreads_and(alike) ? share.Whole(sequences.Get(0).num_kv_tiles, p.few.combines)
                                  : share.equal;
}

// Divides the `total` steps of the sequences with few queries among the thread blocks. starts[i] is
// the number of steps before sequence i.
__device__ void ListFew(const PlanProblem& p, const SequenceTable& sequences, const int32_t* starts,
                        int total, int least, FewBlock* blocks) {
  const int num_blocks = p.few.num_blocks;
  const int share = StepsOfBlock(p, sequences, starts, total, least);
#pragma unroll 1
  for (int b = threadIdx.x; b < num_blocks; b += NumThreads()) {
    const int first = b * share;
    if (first >= total) {
      blocks[b].begin = blocks[b].end = 0;
      continue;
    }
    int i = 0, high = p.index.num_sequences;  // the last with starts[i] <= first
#pragma unroll 1
    while (high - i > 1) {
      const int middle = (i + high) / 2;
      if (starts[middle] <= first) {
        i = middle;
      } else {
        high = middle;
      }
    }
    const PlannedSequence s = sequences.Get(i);
    blocks[b] =
        FewBlockAt(s, i, starts[i], first, min(first + share, total), share, p.few.q_tile_rows);
  }
}

// Calls body(sequence, first, step) for the long sequences: a thread gets items first, first +
// step, ... of the sequence. Lanes share a sequence, and all threads a huge one.
template <typename Body>
__device__ void ForEachLong(const LongList& list, Body&& body) {
  const Lanes lanes(list.size, 8);  // neighbours write to the same lines
#pragma unroll 1
  for (int n = lanes.group(); n < list.size; n += lanes.num_groups()) {
    const LongSequence s = list.Get(n);
    if (s.num_queries <= NumThreads()) body(s, lanes.lane(), lanes.count);
  }
  if (!list.has_huge) return;
#pragma unroll 1
  for (int n = 0; n < list.size; ++n) {
    const LongSequence s = list.Get(n);
    if (s.num_queries > NumThreads()) body(s, threadIdx.x, NumThreads());
  }
}

// Q tile n of many queries. The last tile of a sequence comes first, since it sees the most keys:
// this matters if the list stays unsorted.
__device__ ManyTile ManyTileAt(const PlanProblem& p, const LongList& list, int n) {
  int i = 0, high = list.size;  // the last with first_tile <= n
#pragma unroll 1
  while (high - i > 1) {
    const int middle = (i + high) / 2;
    if (list.Get(middle).first_tile <= n) {
      i = middle;
    } else {
      high = middle;
    }
  }
  const LongSequence l = list.Get(i);
  const int tokens = p.many.q_tile_tokens;
  const int tile = ManyTiles(l.role, l.num_queries, tokens) - 1 - (n - l.first_tile);
  return ManyTileOf(list.sequences.Get(l.index), l.index, p.window, tile * tokens, tokens);
}

// Lists the parts of the `count` q tiles of many queries, the most expensive first. Returns how
// many they are.
__device__ int ListMany(const PlanProblem& p, Shared& shared, const LongList& list, int count,
                        ManyTile* tiles) {
  const bool sorted = count <= kMaxSorted;
  int parts = 1;
  if (sorted) {
#pragma unroll 1
    for (int n = threadIdx.x; n < count; n += NumThreads()) {
      shared.cost_keys[n] = CostKey(KvTilesOf(ManyTileAt(p, list, n), p.many.kv_tile_keys), n);
    }
    SortKeys(shared.cost_keys, count);
    parts = ChooseManyParts(p.many, CostOfKey(shared.cost_keys[0]), count);
  }
#pragma unroll 1
  for (int k = threadIdx.x; k < count; k += NumThreads()) {
    const ManyTile whole = ManyTileAt(p, list, sorted ? TileOfKey(shared.cost_keys[k]) : k);
    for (int part = 0; part < parts; ++part) {
      ManyTile tile = whole;
      p.many.fixed_parts > 0 ? TakeFixedParts(p.many, k, part, parts, &tile)
                             : TakePart(p.many.kv_tile_keys, k, part, parts, &tile);
      tiles[k * parts + part] = tile;
    }
  }
  return count * parts;
}

// Fills in token_sequence for the long sequences.
__device__ void MarkLong(const LongList& list, int32_t* token_sequence) {
  ForEachLong(list, [&](const LongSequence& l, int first, int step) {
    const int mark = MarkOf(l.role, l.index);
#pragma unroll 1
    for (int t = first; t < l.num_queries; t += step) token_sequence[l.first_query + t] = mark;
  });
}

// Lists the sequences with their keys and roles, and the long ones. Fills in token_sequence for
// sequences that are not long.
__device__ void ListSequences(const PlanProblem& p, Scan& scan, const SequenceTable& sequences,
                              LongList& long_list, int32_t* token_sequence, int num_sequences,
                              bool grows) {
  const IndexTensors& index = p.index;
  const int thread = threadIdx.x;
#pragma unroll 1
  for (int i0 = 0; i0 < index.num_sequences; i0 += NumThreads()) {
    const int i = i0 + thread;
    ListedSequence s = {};
    bool is_long = false;
    if (i < num_sequences) {
      s.first_query = At(index.cu_seqlens_q, i);
      s.num_queries =
          grows ? At(index.cu_seqlens_q, i + 1) - s.first_query : sequences.plan[i].num_queries;
      if (ReadKeys(index, i, &s) && s.num_queries > 0) {
        s.role = RoleOf(p.roles, p.group_size, s, SetSeen(p.window, &s));
        is_long = s.num_queries > kMinLong || s.role == kMany;
        if (!is_long) {
          const int mark = MarkOf(s.role, i);
          for (int t = 0; t < s.num_queries; ++t) token_sequence[s.first_query + t] = mark;
        }
      }
    }
    if (i < index.num_sequences) sequences.Set(i, s);
    if (!__syncthreads_or(is_long)) continue;
    int total;
    bool any_huge;
    const bool is_huge = is_long && s.num_queries > NumThreads();
    const int before = scan.Exclusive(is_long, &total, is_huge, &any_huge);
    if (is_long) long_list.Set(long_list.size + before, i, s);
    long_list.size += total;
    long_list.has_huge |= any_huge;
  }
}

// Fills in few_starts, the steps of few queries before each sequence, and *least, which was 0: see
// LeastFewShare. Returns the number of steps.
__device__ int CountFew(const PlanProblem& p, Scan& scan, const SequenceTable& sequences,
                        int32_t* few_starts, int* least) {
  const int num_sequences = p.index.num_sequences;
  int num_steps = 0, total;
#pragma unroll 1
  for (int i0 = 0; i0 < num_sequences; i0 += NumThreads()) {
    const int i = i0 + threadIdx.x;
    PlannedSequence s = {};
    if (i < num_sequences) s = sequences.Get(i);
    const int before = scan.Exclusive(FewSteps(s, p.group_size, p.few.q_tile_rows), &total);
    if (i < num_sequences) few_starts[i] = num_steps + before;
    num_steps += total;
    if (!p.few.combines) continue;
    const unsigned least_share = LeastFewShare(s, p.group_size, p.few.q_tile_rows);
    const int of_warp = __reduce_max_sync(kAllLanes, least_share);
    if (threadIdx.x % 32 == 0) atomicMax(least, of_warp);
  }
  if (threadIdx.x == 0) few_starts[num_sequences] = num_steps;
  __syncthreads();
  return num_steps;
}

// Fills in rest_starts but for its last entry, the number of q tiles of role kRest, which it
// returns.
__device__ int CountRest(const PlanProblem& p, Scan& scan, const SequenceTable& sequences,
                         int32_t* rest_starts) {
  const IndexTensors& index = p.index;
  const int thread = threadIdx.x;
  int num_rest = 0, total;
#pragma unroll 1
  for (int i0 = 0; i0 < index.num_sequences; i0 += NumThreads()) {
    const int i = i0 + thread;
    PlannedSequence s = {};
    if (i < index.num_sequences) s = sequences.Get(i);
    const int64_t rows = int64_t{s.num_queries} * p.group_size;
    const int tiles = s.role == kRest
                          ? static_cast<int>((rows + p.rest_q_tile_rows - 1) / p.rest_q_tile_rows)
                          : 0;
    const int before = scan.Exclusive(tiles, &total);
    if (i < index.num_sequences) rest_starts[i] = num_rest + before;
    num_rest += total;
  }
  return num_rest;
}

// Fills in first_tile of the long sequences. Returns the number of q tiles of role kMany.
__device__ int CountMany(const PlanProblem& p, Scan& scan, const LongList& long_list) {
  const int thread = threadIdx.x;
  int num_many = 0, total;
#pragma unroll 1
  for (int n0 = 0; n0 < long_list.size; n0 += NumThreads()) {
    const int n = n0 + thread;
    int tiles = 0;
    if (n < long_list.size) {
      const LongSequence l = long_list.Get(n);
      tiles = ManyTiles(l.role, l.num_queries, p.many.q_tile_tokens);
    }
    const int before = scan.Exclusive(tiles, &total);
    if (n < long_list.size) long_list.SetFirstTile(n, num_many + before);
    num_many += total;
  }
  return num_many;
}

__global__ void __launch_bounds__(kThreads) PlanKernel(const __grid_constant__ PlanProblem p) {
  __shared__ Shared shared;
  Scan scan{shared.scan};
  const int thread = threadIdx.x;
  TriggerNext();
  WaitForPrevious();
  const IndexTensors& index = p.index;
  const PlanLayout layout = p.layout();
  const SequenceTable sequences{reinterpret_cast<ListedSequence*>(p.plan + layout.sequences()),
                                shared.kept};
  LongList long_list{sequences, p.plan + layout.long_list(), shared.kept_long, 0, false};
  int32_t* rest_starts = p.plan + layout.rest_starts();
  int32_t* few_starts = index.num_sequences < kMaxKept ? shared.few_starts : rest_starts;
  auto* many_tiles = reinterpret_cast<ManyTile*>(p.plan + layout.many_tiles());
  int32_t* token_sequence = p.plan + layout.token_sequence();

  const int num_sequences = NumSequences(index);
  if (thread == 0) shared.least_few_share = 0;
  for (int i = thread; i < index.num_tokens; i += NumThreads()) token_sequence[i] = kNoSequence;
  const bool grows = ReadQueries(index, num_sequences, sequences.plan);

  ListSequences(p, scan, sequences, long_list, token_sequence, num_sequences, grows);
  if (long_list.size > 0) {
    __syncthreads();
    MarkLong(long_list, token_sequence);
    if (p.roles.use_many && !p.roles.all_few && index.block_table.data) {
      CheckTables(p.roles, index.block_table, long_list);
    }
  }
  if (p.roles.use_few) {
    const int num_steps = CountFew(p, scan, sequences, few_starts, &shared.least_few_share);
    if (thread == 0) p.plan[PlanLayout::kTotals + kFew] = num_steps;
    ListFew(p, sequences, few_starts, num_steps, shared.least_few_share,
            reinterpret_cast<FewBlock*>(p.plan + layout.few_blocks()));
  }
  if (p.roles.all_few) return;

  int num_many = CountMany(p, scan, long_list);
  if (num_many > 0) {
    __syncthreads();
    num_many = ListMany(p, shared, long_list, num_many, many_tiles);
  }
  if (thread == 0) p.plan[PlanLayout::kTotals + kMany] = num_many;
  if (p.roles.few_takes_rest) return;
  // few_starts may lie in the same place.
  __syncthreads();
  const int num_rest = CountRest(p, scan, sequences, rest_starts);
  if (thread == 0) {
    rest_starts[index.num_sequences] = num_rest;
    p.plan[PlanLayout::kTotals + kRest] = num_rest;
  }
}

}  // namespace

void LaunchPlan(const PlanProblem& p, cudaStream_t stream) {
  const bool is_small = p.index.num_sequences <= kFewThreads &&
                        p.index.num_tokens <= 64 * kFewThreads &&
                        p.layout().num_many <= 2 * kFewThreads + kMaxPartials;
  LaunchDependent(PlanKernel, 1, is_small ? kFewThreads : kThreads, 0, stream, p);
}

}  // namespace flashxla::attention
