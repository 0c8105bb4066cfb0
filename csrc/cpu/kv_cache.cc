// Writing new keys and values into a paged cache.
#include "flashxla/kv_cache.h"

#include <algorithm>
#include <cstring>

#include "common/needs.h"
#include "common/slot_mapping.h"
#include "common/tensor_view.h"
#include "common/write_arguments.h"
#include "cpu/guard.h"
#include "cpu/parallel.h"
#include "cpu/row_converter.h"

namespace flashxla {
namespace {

// Below this many bytes, waking threads costs more than they save.
constexpr int64_t kInlineBytes = 1 << 20;

// One thread writes a run of 2^kSlotRunBits neighbouring slots.
constexpr int kSlotRunBits = 4;

template <typename Element>
void CopyRow(const char* src, int64_t src_stride, char* dst, int64_t dst_stride, int64_t n, float) {
  if (src_stride == 1 && dst_stride == 1) {
    std::memcpy(dst, src, n * sizeof(Element));
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    std::memcpy(dst + i * dst_stride * sizeof(Element), src + i * src_stride * sizeof(Element),
                sizeof(Element));
  }
}

RowConverter GetRowWriter(int64_t from, int64_t to) {
  if (from != to) return GetRowConverter(from, to);
  switch (ElementSize(to)) {
    case 4:
      return CopyRow<uint32_t>;
    case 2:
      return CopyRow<uint16_t>;
    default:
      return CopyRow<uint8_t>;
  }
}

// One of the two halves of the operation: keys or values.
struct Half {
  const char* src;
  int64_t src_stride_token, src_stride_head, src_stride_dim;  // in elements
  int64_t src_size, dst_size;                                 // of an element
  CacheView cache;
  ScaleView scale;
  RowConverter write;
  bool whole_token;  // all heads of a token are contiguous, in the tensor and in the cache

  Half(const flashxla_tensor& tensor, const CacheView& view, const flashxla_tensor& scales,
       int64_t cache_dtype)
      : src(static_cast<const char*>(tensor.data)),
        src_stride_token(tensor.stride[0]),
        src_stride_head(tensor.stride[1]),
        src_stride_dim(tensor.stride[2]),
        src_size(ElementSize(tensor.dtype)),
        dst_size(ElementSize(cache_dtype)),
        cache(view),
        scale(scales),
        write(GetRowWriter(tensor.dtype, cache_dtype)) {
    const int64_t head_size = cache.head_size;
    whole_token = (cache.num_heads == 1 ||
                   (src_stride_head == head_size && cache.stride_head == head_size)) &&
                  src_stride_dim == 1 && cache.stride_dim == 1 && scale.stride_head == 0;
  }

  void Write(int64_t token, int64_t block, int64_t offset) const {
    const char* from = src + token * src_stride_token * src_size;
    char* to = cache.data + (block * cache.stride_block + offset * cache.stride_token) * dst_size;
    if (whole_token) {
      write(from, 1, to, 1, cache.num_heads * cache.head_size, scale.at(0, 0));
      return;
    }
    for (int64_t head = 0; head < cache.num_heads; ++head) {
      write(from + head * src_stride_head * src_size, src_stride_dim,
            to + head * cache.stride_head * dst_size, cache.stride_dim, cache.head_size,
            scale.at(0, head));
    }
  }
};

flashxla_status WriteCache(const flashxla_kv_cache_args& args, const flashxla_context* context) {
  CacheView key_view, value_view;
  if (const flashxla_status status = ViewWrite(args, &key_view, &value_view);
      status != FLASHXLA_OK) {
    return status;
  }
  const Half key(args.key, key_view, args.k_scale, args.cache_dtype);
  const Half value(args.value, value_view, args.v_scale, args.cache_dtype);
  const SlotMapping slots(args.slot_mapping);
  if (IsAnswered(context, "kv_cache", "vectorized, one row of a head at a time"))
    return FLASHXLA_OK;
  const int64_t block_size = key_view.block_size;
  const int64_t num_slots = key_view.num_blocks * block_size;
  if (context != nullptr && context->check_indices != 0) {
    const flashxla_status status = CheckSlots(slots, num_slots);
    if (status != FLASHXLA_OK) return status;
  }

  // The parts divide the slots, not the tokens. If two tokens name the same slot, one thread writes
  // both, so the slot ends up with one of them and not with a mixture.
  const int64_t token_bytes = key_view.num_heads * (key_view.head_size + value_view.head_size) / 2 *
                              (key.src_size + key.dst_size);
  int64_t num_parts = 1;
  if (slots.size * token_bytes > kInlineBytes) {
    const int64_t wanted = std::min<int64_t>(NumThreads(context) * 4, 256);
    while (NumThreads(context) > 1 && num_parts < wanted) num_parts *= 2;
  }
  ParallelTasks(context, NumThreads(context), num_parts, [&](int64_t, int64_t part) {
    for (int64_t t = 0; t < slots.size; ++t) {
      const int64_t slot = slots[t];
      if (slot < 0 || slot >= num_slots) continue;
      if (((slot >> kSlotRunBits) & (num_parts - 1)) != part) continue;
      const int64_t block = slot / block_size;
      const int64_t offset = slot - block * block_size;
      key.Write(t, block, offset);
      value.Write(t, block, offset);
    }
  });
  return FLASHXLA_OK;
}

}  // namespace
}  // namespace flashxla

flashxla_status flashxla_cpu_kv_cache(const flashxla_kv_cache_args* args,
                                      const flashxla_context* context) {
  return flashxla::GuardedOnCpu("kv_cache", [&] { return flashxla::WriteCache(*args, context); });
}
