// flashxla C ABI: every operation, O(name, fields).
#ifndef FLASHXLA_OPERATIONS_H_
#define FLASHXLA_OPERATIONS_H_

#include "flashxla/attention.h"
#include "flashxla/attention_backward.h"
#include "flashxla/kv_cache.h"
#include "flashxla/merge_states.h"

#define FLASHXLA_OPERATIONS(O)                              \
  O(kv_cache, FLASHXLA_KV_CACHE_FIELDS)                     \
  O(attention, FLASHXLA_ATTENTION_FIELDS)                   \
  O(attention_backward, FLASHXLA_ATTENTION_BACKWARD_FIELDS) \
  O(merge_states, FLASHXLA_MERGE_STATES_FIELDS)

#endif  // FLASHXLA_OPERATIONS_H_
