// The loops of the row converters. Internal linkage, as in dtypes.h.
#ifndef FLASHXLA_CSRC_CPU_ROW_CONVERTER_LOOPS_H_
#define FLASHXLA_CSRC_CPU_ROW_CONVERTER_LOOPS_H_

#include "cpu/dtypes.h"
#include "cpu/row_converter.h"

namespace flashxla {
namespace {

template <typename From, typename To>
void ConvertRow(const char* src_bytes, int64_t src_stride, char* dst_bytes, int64_t dst_stride,
                int64_t n, float scale) {
  const auto* src = reinterpret_cast<const typename From::Bits*>(src_bytes);
  auto* dst = reinterpret_cast<typename To::Bits*>(dst_bytes);
  if (src_stride == 1 && dst_stride == 1) {
    if (scale == 1.0f) {  // the division would take most of the time
      for (int64_t i = 0; i < n; ++i) dst[i] = To::Encode(From::Decode(src[i]));
    } else {
      for (int64_t i = 0; i < n; ++i) dst[i] = To::Encode(From::Decode(src[i]) / scale);
    }
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    dst[i * dst_stride] = To::Encode(From::Decode(src[i * src_stride]) / scale);
  }
}

inline RowConverter FindRowConverter(int64_t from, int64_t to) {
  RowConverter converter = nullptr;
  WithFormat(from, [&](auto from_format) {
    WithFormat(to, [&](auto to_format) {
      converter = ConvertRow<decltype(from_format), decltype(to_format)>;
    });
  });
  return converter;
}

}  // namespace
}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CPU_ROW_CONVERTER_LOOPS_H_
