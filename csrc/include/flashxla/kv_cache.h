// flashxla C ABI: writing new keys and values into a paged cache.
#ifndef FLASHXLA_KV_CACHE_H_
#define FLASHXLA_KV_CACHE_H_

#include "flashxla/operation.h"

// Writes key[t], value[t] to cache slot slot_mapping[t] = block * block_size + offset, for t in
// [0, T). A slot outside [0, num_blocks * block_size) skips its token. When two tokens name one
// slot, which of them stays is unspecified.
//
// Elements are copied where key's dtype is cache_dtype; otherwise cache_dtype is an fp8 format, and
// what is stored is x / scale, to nearest even, saturating.
#define FLASHXLA_KV_CACHE_FIELDS(F)                                                  \
  F(INPUT, key, NONE)          /* [T', Hk, Dk] float32, float16, bfloat16, or fp8 */ \
  F(INPUT, value, NONE)        /* [T', Hk, Dv], key's dtype */                       \
  F(INPUT, key_cache, NONE)    /* updated; by layout: one-tensor layouts are here */ \
  F(INPUT, value_cache, NONE)  /* updated; absent for one-tensor layouts */          \
  F(INPUT, slot_mapping, NONE) /* [T] int32 or int64, T <= T' */                     \
  F(INPUT, k_scale, NONE)      /* optional float32 [1] or [Hk] */                    \
  F(INPUT, v_scale, NONE)      /* optional float32 [1] or [Hk] */                    \
  F(LAYOUT, layout, NONE)                                                            \
  F(DTYPE, cache_dtype, NONE) /* of an element of the caches: never uint8 */

FLASHXLA_OPERATION(kv_cache, FLASHXLA_KV_CACHE_FIELDS);

#endif  // FLASHXLA_KV_CACHE_H_
