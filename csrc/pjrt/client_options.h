// The options that a framework creates its client with, as the plugin gets them.
#ifndef FLASHXLA_CSRC_PJRT_CLIENT_OPTIONS_H_
#define FLASHXLA_CSRC_PJRT_CLIENT_OPTIONS_H_

#include "pjrt/pjrt_abi.h"

namespace flashxla::pjrt {

// Client_Create without the options that only TPUs know, which other plugins refuse, and with those
// of flashxla_pjrt_set_option.
Error* ClientCreate(void* caller);

}  // namespace flashxla::pjrt

#endif  // FLASHXLA_CSRC_PJRT_CLIENT_OPTIONS_H_
