// What makes a plan of index tensors, sequence by sequence. plan.cu makes whole plans; own_plan.cuh
// makes what an engine needs of one, within the engine.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_PLAN_SEQUENCES_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_PLAN_SEQUENCES_CUH_

#include "cuda/attention/plan.cuh"
#include "cuda/attention/warp.cuh"

namespace flashxla::attention {

// For offsets that do not only grow. A sequence is sound if it does not start before the end of an
// earlier sound one; num_queries of the others becomes 0. One warp takes 32 sequences at a time.
// Each sequence starts where the one before ends, so after a sound one all are sound until the
// offsets decrease.
template <typename SequenceType>
__device__ inline void ReadUnsoundQueries(const IndexTensors& index, int num_sequences,
                                          SequenceType* sequences) {
  const int lane = threadIdx.x & 31;
  int previous = 0;  // the end of the last sound one
#pragma unroll 1
  for (int base = 0; base < num_sequences; base += 32) {
    const int i = base + lane;
    int begin = 0, end = -1;
    if (i < num_sequences) begin = At(index.cu_seqlens_q, i), end = At(index.cu_seqlens_q, i + 1);
    const bool grows = AreQueries(index, begin, end);
    const unsigned growing = __ballot_sync(kAllLanes, grows);
    unsigned left = growing, sound = 0;
#pragma unroll 1
    while (const unsigned next = __ballot_sync(kAllLanes, begin >= previous) & left) {
      const int first = __ffs(next) - 1;
      const unsigned stops = ~growing >> first << first;  // from `first` on
      const int last = stops ? __ffs(stops) - 2 : 31;
      const unsigned run = ~0u >> (31 - last) >> first << first;
      sound |= run;
      left &= ~(~0u >> (31 - last));
      previous = __shfl_sync(kAllLanes, end, last);
    }
    if (i < num_sequences) sequences[i].num_queries = (sound >> lane) & 1 ? end - begin : 0;
  }
}

// Fills in the first key and the kv tiles that any row of a sequence sees, and returns the keys.
__device__ inline KeyRange SetSeen(const Window& window, PlannedSequence* s) {
  const KeyRange keys = VisibleKeys(*s, window, 0, s->num_queries - 1);
  s->first_seen = keys.begin;
  s->num_kv_tiles = (keys.end + kFewKvTileKeys - 1) / kFewKvTileKeys - keys.begin / kFewKvTileKeys;
  return keys;
}

// Whether a sequence with more than MaxFewRows is faster with the engine for few queries.
__device__ inline bool IsFewChunk(const RoleRules& rules, int num_queries, int64_t rows,
                                  int num_keys) {
  if (!rules.few_chunks) return false;
  if (num_queries < rules.min_many_queries) return num_keys >= 256;
  return rules.few_takes_long && rows <= kSwapQTileRows && num_keys >= 4096;
}

// The role of a sequence whose queries see `keys`.
__device__ inline Role RoleOf(const RoleRules& rules, int group_size, const Sequence& s,
                              const KeyRange& keys) {
  if (keys.begin >= keys.end) return kIdle;
  const int64_t rows = int64_t{s.num_queries} * group_size;
  if (rules.all_few || (rules.use_few && rows <= MaxFewRows(group_size)) ||
      IsFewChunk(rules, s.num_queries, rows, keys.end - keys.begin)) {
    return kFew;
  }
  if (rules.use_many && s.num_queries >= rules.min_many_queries) return kMany;
  return rules.few_takes_rest ? kFew : kRest;
}

// Lanes of a warp that share a sequence: so many that all of these fit the threads of the block, if
// they can, but not fewer than `least`.
struct Lanes {
  int count;

  __device__ explicit Lanes(int num_sequences, int least = 1) : count(32) {
    const int threads = static_cast<int>(blockDim.x);
    while (count > least && num_sequences * count > threads) count /= 2;
  }
  __device__ int group() const { return threadIdx.x / count; }
  __device__ int num_groups() const { return blockDim.x / count; }
  __device__ int lane() const { return threadIdx.x % count; }
  // Whether x holds in any lane of the group.
  __device__ bool Any(bool x) const {
    const unsigned group = (count == 32 ? kAllLanes : (1u << count) - 1)
                           << (threadIdx.x & 31) / count * count;
    return __any_sync(group, x);
  }
};

// Pages [begin, end) of a sequence.
struct PageRange {
  unsigned begin, end;
  __device__ unsigned size() const { return end - begin; }
};

// Whether the table has an unsound page among these; of each `step` of them this thread looks at
// number `first`.
__device__ inline bool HasUnsoundPage(const BlockTable& table, int index, PageRange pages,
                                      unsigned first, unsigned step) {
  constexpr int kAtOnce = 8;  // loads that overlap
  bool unsound = false;
#pragma unroll 1
  for (unsigned base = pages.begin + first; base < pages.end; base += kAtOnce * step) {
    int block[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const unsigned page = base + i * step;
      block[i] = page < pages.end ? Entry(table, index, static_cast<int>(page)) : 0;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) unsound |= !IsSound(table, block[i]);
  }
  return unsound;
}

// A look at all entries of a block table, if they are few: where all are sound, CheckTables would
// find nothing. It is made before anything is known of the sequences, so that its loads overlap
// with those of the offsets.
class TableGlance {
 public:
  __device__ TableGlance(const BlockTable& table, bool wanted)
      : table_(table),
        looks_(wanted && table.num_entries > 0 && table.num_entries <= kAtMost * blockDim.x) {
    if (looks_) Load(threadIdx.x);
  }
  // Whether this thread sees only sound entries, and all threads look.
  __device__ bool AllSound() {
    if (!looks_) return false;
    unsigned first = threadIdx.x;
    while (true) {
      bool sound = true;
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) sound &= IsSound(table_, block_[n]);
      first += kAtOnce * blockDim.x;
      if (!sound || first >= table_.num_entries) return sound;
      Load(first);
    }
  }

 private:
  static constexpr int kAtMost = 8, kAtOnce = 4;  // entries of a thread; loads that overlap

  __device__ void Load(unsigned first) {
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const unsigned i = first + n * blockDim.x;
      block_[n] = i < table_.num_entries ? table_.data[i] : 0;
    }
  }

  const BlockTable& table_;
  bool looks_;
  int block_[kAtOnce];
};

// The engine for many queries takes each key that a row sees as one that is there: a sequence with
// an unsound page among these gets another role. (The cache has pages; without any, the engine does
// not serve the call.) list: its size, SetRole(n, role), and Get(n) with the index, first_seen,
// num_keys and role of a sequence. All threads of the block must call it.
template <typename List>
__device__ void CheckTables(const RoleRules& rules, const BlockTable& table, const List& list) {
  // Lanes check a sequence of so many pages each, else all threads: so do they for a few sequences
  // in the time of one round of loads.
  const unsigned most_of_lane = min(8 * list.size, 128);
  const Role other = rules.few_takes_rest ? kFew : kRest;
  auto pages_of = [&](const auto& s) -> PageRange {
    if (s.role != kMany) return {0, 0};
    const unsigned size = table.block_size;
    return {s.first_seen / size, (s.num_keys - 1) / size + 1};
  };
  bool more = false;
  const Lanes lanes(list.size);
#pragma unroll 1
  for (int n = lanes.group(); n < list.size; n += lanes.num_groups()) {
    const auto s = list.Get(n);
    const PageRange pages = pages_of(s);
    if (pages.size() > most_of_lane * lanes.count) {
      more = true;
    } else if (lanes.Any(HasUnsoundPage(table, s.index, pages, lanes.lane(), lanes.count))) {
      if (lanes.lane() == 0) list.SetRole(n, other);
    }
  }
  if (!__syncthreads_or(more)) return;
#pragma unroll 1
  for (int n = 0; n < list.size; ++n) {
    const auto s = list.Get(n);
    const PageRange pages = pages_of(s);
    if (pages.size() <= most_of_lane * lanes.count) continue;
    const bool unsound = HasUnsoundPage(table, s.index, pages, threadIdx.x, blockDim.x);
    if (__syncthreads_or(unsound) && threadIdx.x == 0) list.SetRole(n, other);
  }
  __syncthreads();
}

// The q tiles of many queries that a sequence has.
__device__ inline int ManyTiles(int role, int num_queries, int q_tile_tokens) {
  return role == kMany ? (num_queries + q_tile_tokens - 1) / q_tile_tokens : 0;
}

// The q tile of many queries that begins with query first_query of sequence `index`.
__device__ inline ManyTile ManyTileOf(const Sequence& s, int index, const Window& window,
                                      int first_query, int q_tile_tokens) {
  const int last_query = min(first_query + q_tile_tokens, s.num_queries) - 1;
  const KeyRange keys = VisibleKeys(s, window, first_query, last_query);
  return {index, 0, 0, first_query, keys.begin, keys.end, 0, 1, 0, s};
}

// The steps of few queries that a sequence has.
__device__ inline int FewSteps(const PlannedSequence& s, int group_size, int q_tile_rows) {
  if (s.role != kFew) return 0;
  const int64_t rows = int64_t{s.num_queries} * group_size;
  return s.num_kv_tiles * static_cast<int>((rows + q_tile_rows - 1) / q_tile_rows);
}

// Roughly a / b, rounded down. Much faster than the exact quotient.
__device__ inline int RoughQuotient(int a, int b) {
  return static_cast<int>(__fdividef(static_cast<float>(a), static_cast<float>(b)) + 1e-3f);
}

// Roughly the square root, likewise.
__device__ inline float RoughRoot(float x) {
  float root;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
}

// The fewest steps that a thread block should get of a sequence, where one block combines what
// several computed of a q tile: fewer steps are sooner done, but leave more to combine. Each step
// more takes as long as some parts more: about 4 of up to 16 rows, which are combined together; on
// an H200 57 of a row if there are more. Large q tiles take longer, and twice as many warps combine
// them.
__device__ inline int LeastFewShare(const PlannedSequence& s, int group_size, int q_tile_rows) {
  if (s.role != kFew) return 0;
  const int64_t rows = int64_t{s.num_queries} * group_size;
  const float rows_of_tile = static_cast<float>(rows < q_tile_rows ? rows : q_tile_rows);
  const float parts = q_tile_rows > kSwapMidRows      ? rows_of_tile * (1.f / 200.f)
                      : q_tile_rows > kSplitQTileRows ? rows_of_tile * (1.f / 57.f)
                                                      : 0.26f;
  return static_cast<int>(RoughRoot(static_cast<float>(s.num_kv_tiles) * parts));
}

// How many of the `total` steps of few queries a thread block gets: an equal share, but not fewer
// than `least`; or as many more as leave each block a multiprocessor of its own, if the steps are
// few; or some more where all sequences are alike, if then blocks have whole q tiles or q tiles
// whole blocks. Whole q tiles need not be combined, other q tiles have fewer parts, and fewer
// blocks keep the memory busy, too.
struct FewShare {
  int total, num_lone_blocks, equal;

  // lone_blocks: as num_lone_blocks in FewShape.
  __device__ FewShare(int all_steps, int equal_share, int least, int lone_blocks)
      : total(all_steps), num_lone_blocks(lone_blocks), equal(max(max(equal_share, least), 1)) {
    constexpr int kMostAlone = 16;  // with more steps two blocks hide more of each other's waiting
    if (num_lone_blocks == 0) return;
    const int alone = RoughQuotient(total + num_lone_blocks - 1, num_lone_blocks);
    if (equal < alone && alone <= kMostAlone) equal = alone;
  }

  // If all q tiles have `tile` steps. combines: blocks combine what they share.
  __device__ int Whole(int tile, bool combines) const {
    auto multiple = [&](int of) { return RoughQuotient(equal + of - 1, of) * of; };
    // Combining takes as long as some steps. Where two blocks share a multiprocessor and others
    // have one alone, these are done before.
    const int tiles = multiple(tile);
    if (combines && tiles >= equal &&
        tiles - equal <= (int64_t{tiles} * num_lone_blocks >= total ? 5 : 2)) {
      return tiles;
    }
    const int parts = max(RoughQuotient(tile, equal), 1), part = RoughQuotient(tile, parts);
    const int whole = multiple(part);
    return part * parts == tile && whole >= equal && whole <= equal + equal / 16 ? whole : equal;
  }
};

// The block with steps [begin, end), the first of which belongs to sequence `index`, whose steps
// start at `start`.
__device__ inline FewBlock FewBlockAt(const PlannedSequence& s, int index, int start, int begin,
                                      int end, int share, int q_tile_rows) {
  const int before = begin - start;
  const int row_tile = before < s.num_kv_tiles ? 0 : before / s.num_kv_tiles;
  return {begin, end, index, row_tile * q_tile_rows, start + row_tile * s.num_kv_tiles,
          share, {},  s};
}

// What token_sequence says for the tokens of a sound sequence.
__device__ inline int MarkOf(int role, int index) {
  return role == kIdle ? KeylessMark(index) : index;
}

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_PLAN_SEQUENCES_CUH_
