// DLPack's struct, with which frameworks share memory.
#ifndef FLASHXLA_CSRC_PJRT_DLPACK_H_
#define FLASHXLA_CSRC_PJRT_DLPACK_H_

#include <cstdint>

namespace flashxla::pjrt {

// DLManagedTensor of DLPack, which has not changed since its version 0.2.
struct ManagedTensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t dtype_code;
  uint8_t dtype_bits;
  uint16_t dtype_lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
  void* manager_ctx;
  void (*deleter)(ManagedTensor* self);
};

}  // namespace flashxla::pjrt

#endif  // FLASHXLA_CSRC_PJRT_DLPACK_H_
