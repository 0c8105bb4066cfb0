// Descriptors of tensors for the bulk tensor copy engine.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_TENSOR_MAP_H_
#define FLASHXLA_CSRC_CUDA_ATTENTION_TENSOR_MAP_H_

#include <cuda.h>

#include <cstdint>

#include "cuda/attention/problem.cuh"

namespace flashxla::attention {

// A tensor of 16-bit or fp8 elements, innermost dimension first, strides in elements; boxes of 128
// bytes a row are swizzled, elements outside the tensor read as zero. False: the driver refuses.
bool MakeTensorMap(const void* data, int64_t dtype, int rank, const int64_t* sizes,
                   const int64_t* strides, const int* box, CUtensorMap* map);

// Keys or values by (dim, head, token in block, block), in boxes of `columns` dims and `keys`
// tokens.
bool MapCache(const Problem& p, const Cache& c, int columns, int keys, CUtensorMap* map);

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_TENSOR_MAP_H_
