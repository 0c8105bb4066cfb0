// flashxla C ABI: writing new keys and values into a paged cache.
#ifndef FLASHXLA_KV_CACHE_H_
#define FLASHXLA_KV_CACHE_H_

#include "flashxla/common.h"

#ifdef __cplusplus
extern "C" {
#endif

// Writes key[t], value[t] to cache slot slot_mapping[t] = block * block_size + offset, for t in
// [0, T). A slot outside [0, num_blocks * block_size) skips its token. When two tokens name one
// slot, which of them stays is unspecified.
typedef struct flashxla_kv_cache_args {
  flashxla_tensor key;           // [T', Hk, D] f32, f16, bf16
  flashxla_tensor value;         // [T', Hk, D], key's dtype
  flashxla_tensor key_cache;     // by layout; one-tensor layouts hold K and V here
  flashxla_tensor value_cache;   // by layout; absent for one-tensor layouts
  flashxla_tensor slot_mapping;  // [T] i32 or i64, T <= T'
  flashxla_tensor k_scale;       // optional f32 [1] or [Hk]: stored = x / scale (fp8 caches only)
  flashxla_tensor v_scale;
  int64_t layout;       // flashxla_layout
  int64_t cache_dtype;  // flashxla_dtype of a cache element (never U8)
} flashxla_kv_cache_args;

FLASHXLA_EXPORT flashxla_status flashxla_cpu_kv_cache(const flashxla_kv_cache_args* args,
                                                      const flashxla_context* context);
FLASHXLA_EXPORT flashxla_status flashxla_cuda_kv_cache(const flashxla_kv_cache_args* args,
                                                       const flashxla_context* context);

#ifdef __cplusplus
}
#endif

#endif  // FLASHXLA_KV_CACHE_H_
