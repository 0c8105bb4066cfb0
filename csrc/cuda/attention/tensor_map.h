// Tensor maps: the descriptors that TMA copies need.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_TENSOR_MAP_H_
#define FLASHXLA_CSRC_CUDA_ATTENTION_TENSOR_MAP_H_

#include <cuda.h>

#include "cuda/attention/problem.cuh"

namespace flashxla::attention {

// For 16-bit or fp8 elements. A box has rows of 128 bytes, which are swizzled; elements outside the
// tensor read as zero. False if the driver refuses.

// Whether TMA takes a dimension of 16-bit elements: strides of at least one element and less than
// 2^40 bytes.
inline bool TakesStride(int64_t size, int64_t stride) {
  return size <= 1 || (stride > 0 && stride < (int64_t{1} << 39));
}

// The most bytes, up to 16, that can be accessed at a time of keys or values with elements of
// `size` bytes, if they start at `address`. Where the elements of a head lie apart, an element.
int64_t UnitOf(const Cache& cache, int64_t size, int64_t address);

// Why a call has no keys to load; "" if it may have some.
const char* WhyNoKeys(const Problem& p);

// Why TMA cannot load the keys and values in boxes of at least `least` keys, a power of two, that
// each lie in one page; "" if it can.
const char* WhyNoCacheBoxes(const Problem& p, int least);

// Keys per such a box: at most `most`, a power of two.
int KeysOfBox(const Problem& p, int most);

// Rows by (dim, head, token), in boxes of `box_columns` dims, `box_heads` heads and `box_tokens`
// tokens.
bool MapRows(const Rows& rows, int64_t dtype, int64_t num_tokens, int64_t num_heads,
             int64_t head_size, int box_columns, int box_heads, int box_tokens, CUtensorMap* map);

// Queries, likewise.
bool MapQueries(const Problem& p, int box_columns, int box_heads, int box_tokens, CUtensorMap* map);

// Keys or values by (dim, head, token in block, block), in boxes of `columns` dims and `keys`
// tokens. once: each key is read by one thread block.
bool MapCache(const Problem& p, const Cache& c, int columns, int keys, bool once, CUtensorMap* map);

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_TENSOR_MAP_H_
