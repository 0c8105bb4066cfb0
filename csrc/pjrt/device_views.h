// Makes another framework's device memory a PJRT buffer, for a framework that can only transfer
// host memory: a transfer from an agreed host address gives a view of the device memory instead.
#ifndef FLASHXLA_CSRC_PJRT_DEVICE_VIEWS_H_
#define FLASHXLA_CSRC_PJRT_DEVICE_VIEWS_H_

#include "pjrt/pjrt_abi.h"

namespace flashxla::pjrt {

// In place of Client_BufferFromHostBuffer: a view if one was provided for its host address.
Error* BufferFromHostBufferOrView(void* caller);

}  // namespace flashxla::pjrt

#endif  // FLASHXLA_CSRC_PJRT_DEVICE_VIEWS_H_
