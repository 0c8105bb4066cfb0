// With batch_invariant the sums of a row are formed of parts of the keys that begin at fixed kv
// tiles of a sequence, and then added up, the last part first. So their bits do not depend on which
// thread blocks compute the parts: one alone, or, where q tiles are few, several (many_parts.cuh).
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_FIXED_PARTS_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_FIXED_PARTS_CUH_

#include "cuda/attention/plan.cuh"

namespace flashxla::attention {

// A part has about kFixedPartKeys keys, if it is one of the first kFixedParts. From there on it has
// 1/32 to 1/16 of the keys before it, so that not even the longest sequences have many.
//
// Longer parts would leave less to share out; each end of a part costs a block as long as a kv
// tile.
constexpr int kFixedPartKeys = 2048, kFixedParts = 32;

struct FixedPart {
  int first, index, size;  // its first kv tile, its number, its kv tiles

  // The part of kv tile n.
  __host__ __device__ static FixedPart Of(int n, int kv_tile_keys) {
    const int least = (kFixedPartKeys + kv_tile_keys / 2) / kv_tile_keys, nth_of_least = n / least;
    int log2 = 0;  // of how much longer it is than the first ones
#if defined(__CUDA_ARCH__)
    if (nth_of_least >= kFixedParts) log2 = 32 - __clz(nth_of_least / kFixedParts);
#else
    while (nth_of_least >> log2 >= kFixedParts) ++log2;
#endif
    const int nth = nth_of_least >> log2, size = least << log2;
    return {nth * size, nth + kFixedParts / 2 * log2, size};
  }
};

__device__ inline int DivideUp(int a, int b) { return (a + b - 1) / b; }

// The kv tiles that a thread block takes together, some fixed parts, if kv_tiles are divided into
// `parts`. size: of the last fixed part. None is longer.
__device__ inline int KvTilesOfFixed(int kv_tiles, int parts, int size) {
  return max(DivideUp(DivideUp(kv_tiles, parts), size), 1) * size;
}

// As TakePart, where a part has some fixed parts.
__device__ inline void TakeFixedParts(const ManyShape& shape, int k, int part, int parts,
                                      ManyTile* tile) {
  const int keys = shape.kv_tile_keys, whole_begin = tile->begin;
  const int first = FixedPart::Of(tile->begin / keys, keys).first, end = DivideUp(tile->end, keys);
  const int each = KvTilesOfFixed(end - first, parts, FixedPart::Of(max(end - 1, 0), keys).size);
  const int num_parts = max(DivideUp(end - first, each), 1);
  tile->part = static_cast<uint8_t>(part), tile->num_parts = static_cast<uint8_t>(num_parts);
  tile->partial = static_cast<uint16_t>(k * shape.fixed_parts + part);
  tile->whole_begin = whole_begin;
  if (part >= num_parts) {
    tile->begin = tile->end = tile->num_parts = 0;
    return;
  }
  auto begin_of = [&](int n) { return FixedPart::Of(first + n * each, keys).first * keys; };
  if (part > 0) tile->begin = begin_of(part);
  if (part + 1 < num_parts) tile->end = begin_of(part + 1);
}

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_FIXED_PARTS_CUH_
