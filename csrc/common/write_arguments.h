// Checks and views of a cache write's arguments, the same on every platform.
#ifndef FLASHXLA_CSRC_COMMON_WRITE_ARGUMENTS_H_
#define FLASHXLA_CSRC_COMMON_WRITE_ARGUMENTS_H_

#include "common/tensor_view.h"
#include "flashxla/kv_cache.h"

namespace flashxla {

// Views the caches. Refuses what the kernels do not support.
flashxla_status ViewWrite(const flashxla_kv_cache_args& args, CacheView* key_cache,
                          CacheView* value_cache);

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_COMMON_WRITE_ARGUMENTS_H_
