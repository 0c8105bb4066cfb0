// Checks and views of attention's arguments, the same on every platform.
#ifndef FLASHXLA_CSRC_COMMON_ATTENTION_ARGUMENTS_H_
#define FLASHXLA_CSRC_COMMON_ATTENTION_ARGUMENTS_H_

#include <cstdint>

#include "common/tensor_view.h"
#include "flashxla/attention.h"
#include "flashxla/kv_cache.h"

namespace flashxla {

constexpr int64_t kMaxHeadSize = 576, kMaxValueHeadSize = 512;

// The arguments with q, key and value, which are parts of qkv where that is given.
flashxla_attention_args Unpacked(const flashxla_attention_args& args);

// Refuses what the kernels do not support: dtypes, head sizes, shapes that do not go together, more
// tokens than 32 bits can count. A call that passes is memory safe.
flashxla_status CheckAttentionArguments(const flashxla_attention_args& args);

// Keys and values, dense or paged.
void ViewKeys(const flashxla_attention_args& args, CacheView* k, CacheView* v);

// The cache write of a call with new keys and values. If the call has no slot_mapping, neither has
// the result: the caller fills it in.
flashxla_kv_cache_args WriteOf(const flashxla_attention_args& args);

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_COMMON_ATTENTION_ARGUMENTS_H_
