#include "common/write_arguments.h"

#include <cinttypes>

#include "common/error.h"

namespace flashxla {
namespace {

bool CanWrite(int64_t from, int64_t to) {
  const bool is_float = from == FLASHXLA_F32 || from == FLASHXLA_F16 || from == FLASHXLA_BF16;
  return from == to ? is_float || IsFp8(from) : is_float && IsFp8(to);
}

bool GoesWith(const flashxla_tensor& t, const CacheView& cache) {
  return t.rank == 3 && t.shape[1] == cache.num_heads && t.shape[2] == cache.head_size;
}

}  // namespace

flashxla_status ViewWrite(const flashxla_kv_cache_args& args, CacheView* key_cache,
                          CacheView* value_cache) {
  if (args.key.dtype != args.value.dtype || !CanWrite(args.key.dtype, args.cache_dtype)) {
    return SetError(FLASHXLA_INVALID_ARGUMENT, "cannot write dtype %" PRId64 " as %" PRId64,
                    args.key.dtype, args.cache_dtype);
  }
  const int64_t num_tokens = args.slot_mapping.shape[0];
  if (num_tokens > args.key.shape[0] || num_tokens > args.value.shape[0]) {
    return SetError(FLASHXLA_INVALID_ARGUMENT,
                    "slot_mapping has %" PRId64 " tokens, key and value have %" PRId64
                    " and %" PRId64,
                    num_tokens, args.key.shape[0], args.value.shape[0]);
  }
  ViewCache(args.key_cache, args.value_cache, args.layout, key_cache, value_cache);
  if (!GoesWith(args.key, *key_cache) || !GoesWith(args.value, *value_cache) ||
      key_cache->num_blocks != value_cache->num_blocks ||
      key_cache->block_size != value_cache->block_size) {
    return SetError(FLASHXLA_INVALID_ARGUMENT, "key, value and the caches do not go together");
  }
  return FLASHXLA_OK;
}

}  // namespace flashxla
