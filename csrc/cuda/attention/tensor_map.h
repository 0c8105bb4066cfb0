// Descriptors of tensors for the bulk tensor copy engine.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_TENSOR_MAP_H_
#define FLASHXLA_CSRC_CUDA_ATTENTION_TENSOR_MAP_H_

#include <cuda.h>

#include <cstdint>

namespace flashxla::attention {

// Whether the driver can make them.
bool TensorMapsAvailable();

// A 16-bit tensor, innermost dimension first, strides in elements; boxes of 128 bytes a row are
// swizzled, elements outside the tensor read as zero.
CUtensorMap MakeTensorMap(const void* data, int64_t dtype, int rank, const int64_t* sizes,
                          const int64_t* strides, const int* box);

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_TENSOR_MAP_H_
