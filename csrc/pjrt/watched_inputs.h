// Execute that shows a watcher where the inputs of each program lie.
#ifndef FLASHXLA_CSRC_PJRT_WATCHED_INPUTS_H_
#define FLASHXLA_CSRC_PJRT_WATCHED_INPUTS_H_

#include "pjrt/plugin.h"

namespace flashxla::pjrt {

Error* ExecuteWatched(void* caller);

}  // namespace flashxla::pjrt

#endif  // FLASHXLA_CSRC_PJRT_WATCHED_INPUTS_H_
