// Converting rows of elements to another float format, compiled once per instruction set.
#ifndef FLASHXLA_CSRC_CPU_ROW_CONVERTER_H_
#define FLASHXLA_CSRC_CPU_ROW_CONVERTER_H_

#include <cstdint>

namespace flashxla {

// Writes n elements: dst[i * dst_stride] = src[i * src_stride] / scale. Strides in elements.
using RowConverter = void (*)(const char* src, int64_t src_stride, char* dst, int64_t dst_stride,
                              int64_t n, float scale);

// The converter between two float formats (flashxla_dtype), or nullptr if there is none.
RowConverter GetRowConverter(int64_t from, int64_t to);

RowConverter BaselineRowConverter(int64_t from, int64_t to);
RowConverter Avx2RowConverter(int64_t from, int64_t to);    // x86-64 only
RowConverter Avx512RowConverter(int64_t from, int64_t to);  // x86-64 only

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CPU_ROW_CONVERTER_H_
