// The slots of a cache write.
#ifndef FLASHXLA_CSRC_COMMON_SLOT_MAPPING_H_
#define FLASHXLA_CSRC_COMMON_SLOT_MAPPING_H_

#include <cstdint>

#include "flashxla/common.h"

namespace flashxla {

// A slot_mapping in host memory: i32 or i64 [T].
struct SlotMapping {
  const char* data;
  int64_t stride, size;
  bool is_i64;

  explicit SlotMapping(const flashxla_tensor& t)
      : data(static_cast<const char*>(t.data)),
        stride(t.stride[0]),
        size(t.shape[0]),
        is_i64(t.dtype == FLASHXLA_I64) {}

  int64_t operator[](int64_t i) const {
    if (is_i64) return reinterpret_cast<const int64_t*>(data)[i * stride];
    return reinterpret_cast<const int32_t*>(data)[i * stride];
  }
};

// An error for the first slot past the end of the cache. Negative slots are padding.
flashxla_status CheckSlots(const SlotMapping& slots, int64_t num_slots);

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_COMMON_SLOT_MAPPING_H_
