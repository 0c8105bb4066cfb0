// The work lists of attention's gradients: the plan of attention itself, and after it where the
// rows and the tiles of keys of each sequence lie.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_PLAN_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_PLAN_CUH_

#include "cuda/attention/plan.cuh"

namespace flashxla::attention_backward {

// Query tokens of a row tile. Each sequence starts a new tile.
constexpr int kRowTile = 64;

// Where the parts lie: offsets in words. S sequences, T query tokens, Tk rows of k.
struct PlanLayout {
  attention::PlanLayout attention;
  int32_t
      key_tile;  // keys of a key tile: positions [n * key_tile, (n + 1) * key_tile) of a sequence
  int32_t num_row_tiles, num_key_tiles;  // at most

  PlanLayout(int64_t sequences, int64_t tokens, int64_t keys, int32_t keys_of_tile)
      : attention(sequences, tokens, 0, false),
        key_tile(keys_of_tile),
        num_row_tiles(static_cast<int32_t>(tokens / kRowTile + sequences)),
        num_key_tiles(static_cast<int32_t>(keys / keys_of_tile + sequences)) {}

  enum Total { kSharesKeys, kKeyTiles, kNextItem, kTotals = 4 };

  __host__ __device__ int64_t totals() const { return (attention.words() + 3) / 4 * 4; }
  // Entry s counts the row tiles of the sequences before s [S + 1]
  __host__ __device__ int64_t row_tile_starts() const { return totals() + kTotals; }
  // (sequence, key tile in it) [num_key_tiles], the most expensive first. In the list of a
  // deterministic call those of a sequence are in their own order.
  __host__ __device__ int64_t key_tiles() const {
    return (row_tile_starts() + attention.num_sequences + 2) / 2 * 2;
  }
  __host__ __device__ int64_t words() const { return key_tiles() + 2ll * num_key_tiles; }
};

struct PlanView {
  const int32_t* totals;
  const attention::ListedSequence* sequences;  // those without queries or keys have the role kIdle
  // q tiles of attention::kRestQTileRows rows (of a KV head) of all sequences that see keys.
  const int32_t* rest_starts;
  const int32_t* rest_total;
  const int32_t* token_sequence;  // see attention::PlanView
  const int32_t* row_tile_starts;
  const int2* key_tiles;
  int32_t num_sequences, num_row_tiles;
  int32_t* next_item;  // starts at 0: a counter for an engine

  PlanView() = default;
  PlanView(int32_t* words, const PlanLayout& layout)
      : totals(words + layout.totals()),
        row_tile_starts(words + layout.row_tile_starts()),
        key_tiles(reinterpret_cast<const int2*>(words + layout.key_tiles())),
        num_row_tiles(layout.num_row_tiles),
        next_item(words + layout.totals() + PlanLayout::kNextItem) {
    const attention::PlanView view(words, layout.attention);
    sequences = view.sequences, rest_starts = view.rest_starts;
    rest_total = view.totals + attention::kRest;
    token_sequence = view.token_sequence, num_sequences = view.num_sequences;
  }

  // Of lse2 and delta, for each head.
  __host__ __device__ int64_t num_rows() const { return int64_t{num_row_tiles} * kRowTile; }
  // Whether sequences may have keys in common. There is no list of key tiles then.
  __device__ bool shares_keys() const { return totals[PlanLayout::kSharesKeys] != 0; }
  __device__ int num_key_tiles() const { return totals[PlanLayout::kKeyTiles]; }
};

// Writes the plan.
void LaunchPlan(const IndexTensors& index, Window window, int32_t group_size, bool deterministic,
                const PlanLayout& layout, int32_t* words, cudaStream_t stream);

}  // namespace flashxla::attention_backward

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_PLAN_CUH_
