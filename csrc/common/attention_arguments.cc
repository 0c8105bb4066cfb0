#include "common/attention_arguments.h"

#include <cinttypes>
#include <initializer_list>

#include "common/error.h"
#include "common/sequences.h"

namespace flashxla {
namespace {

bool HasShape(const flashxla_tensor& t, std::initializer_list<int64_t> shape) {
  if (t.rank != static_cast<int64_t>(shape.size())) return false;
  const int64_t* size = t.shape;
  for (const int64_t expected : shape) {
    if (*size++ != expected) return false;
  }
  return true;
}

CacheView ViewDense(const flashxla_tensor& t) {
  CacheView view;
  view.data = static_cast<char*>(t.data);
  view.num_blocks = 1;
  view.block_size = t.shape[0], view.stride_token = t.stride[0];
  view.num_heads = t.shape[1], view.stride_head = t.stride[1];
  view.head_size = t.shape[2], view.stride_dim = t.stride[2];
  return view;
}

Index IndexOf(const flashxla_tensor& t) {
  return {static_cast<const int32_t*>(t.data), t.rank > 0 ? t.stride[0] : 0};
}

flashxla_status Refuse(const char* what) {
  return SetError(FLASHXLA_INVALID_ARGUMENT, "attention: %s", what);
}

// Refuses counts that the kernels cannot hold in 32 bits. The products here fit 64 bits, since
// factors above the limit are refused first.
flashxla_status CheckCounts(const flashxla_attention_args& args, const CacheView& k) {
  // Kernels round up to whole tiles, or to a round of all warps of a GPU.
  constexpr int64_t kMost = INT32_MAX - (1 << 18);
  auto refuse = [](const char* what, int64_t got) {
    return SetError(FLASHXLA_INVALID_ARGUMENT, "%s: got %" PRId64 "; accepted: at most %" PRId64,
                    what, got, kMost);
  };
  const int64_t tokens = args.q.shape[0], heads = args.q.shape[1];
  const int64_t sequences = args.cu_seqlens_q.shape[0] - 1;
  const int64_t pages = args.block_table.data ? args.block_table.shape[1] : 1;  // per sequence
  if (tokens > kMost || heads > kMost || tokens * heads > kMost) {
    return refuse("q: tokens times heads", tokens * heads);
  }
  if (sequences > kMost || sequences * heads > kMost) {
    return refuse("cu_seqlens_q: sequences times heads", sequences * heads);
  }
  if (k.num_blocks > kMost) return refuse("k: blocks", k.num_blocks);
  if (k.block_size > kMost) return refuse("k: tokens of a block", k.block_size);
  if (pages > kMost || pages * k.block_size > kMost) {
    return refuse("block_table: room for tokens", pages * k.block_size);
  }
  return FLASHXLA_OK;
}

flashxla_status CheckNewKeys(const flashxla_attention_args& args, const CacheView& k,
                             const CacheView& v) {
  if (args.block_table.data == nullptr) return Refuse("new keys need paged ones");
  const int64_t tokens = args.q.shape[0];
  if (!HasShape(args.key, {tokens, k.num_heads, k.head_size}) ||
      !HasShape(args.value, {tokens, v.num_heads, v.head_size}) ||
      args.key.dtype != args.value.dtype) {
    return Refuse("key and value do not go with q, k and v");
  }
  return FLASHXLA_OK;
}

// Heads [first, first + count) of each token.
flashxla_tensor HeadsOf(const flashxla_tensor& t, int64_t first, int64_t count) {
  flashxla_tensor heads = t;
  heads.data = static_cast<char*>(t.data) + first * t.stride[1] * ElementSize(t.dtype);
  heads.shape[1] = count;
  return heads;
}

}  // namespace

flashxla_attention_args Unpacked(const flashxla_attention_args& args) {
  flashxla_attention_args unpacked = args;
  if (args.qkv.data == nullptr || args.qkv.rank != 3) return unpacked;
  CacheView k, v;
  ViewKeys(args, &k, &v);
  const int64_t heads = args.qkv.shape[1] - 2 * k.num_heads;
  if (heads < 0) return unpacked;
  unpacked.q = HeadsOf(args.qkv, 0, heads);
  unpacked.key = HeadsOf(args.qkv, heads, k.num_heads);
  unpacked.value = HeadsOf(args.qkv, heads + k.num_heads, k.num_heads);
  return unpacked;
}

void ViewKeys(const flashxla_attention_args& args, CacheView* k, CacheView* v) {
  if (args.block_table.data != nullptr) {
    ViewCache(args.k, args.v, args.layout, k, v);
  } else {
    *k = ViewDense(args.k), *v = ViewDense(args.v);
  }
}

flashxla_status CheckAttentionArguments(const flashxla_attention_args& args) {
  const bool paged = args.block_table.data != nullptr;
  if (args.q.data == nullptr) return Refuse("there is no q, or qkv does not go with k");
  if (paged && args.seqused_k.data == nullptr) return Refuse("paged keys need seqused_k");
  if (!paged && args.cu_seqlens_k.data == nullptr) return Refuse("dense keys need cu_seqlens_k");
  CacheView k, v;
  ViewKeys(args, &k, &v);
  if (!IsFloat(args.q.dtype) || !IsFloat(args.kv_dtype) || !IsFloat(args.out.dtype)) {
    return Refuse("unsupported dtype");
  }
  const int64_t heads = args.q.shape[1];
  if (k.num_heads < 1 || heads % k.num_heads != 0) return Refuse("unsupported number of heads");
  if (k.head_size < 1 || k.head_size > kMaxHeadSize || v.head_size < 1 ||
      v.head_size > kMaxValueHeadSize) {
    return Refuse("unsupported head size");
  }
  if (args.q.rank != 3 || args.q.shape[2] != k.head_size || v.num_heads != k.num_heads ||
      v.num_blocks != k.num_blocks || v.block_size != k.block_size ||
      !HasShape(args.out, {args.q.shape[0], heads, v.head_size})) {
    return Refuse("q, k, v and out do not go together");
  }
  if (const flashxla_status status = CheckCounts(args, k); status != FLASHXLA_OK) return status;
  return args.key.data ? CheckNewKeys(args, k, v) : FLASHXLA_OK;
}

IndexTensors IndexTensorsOf(const flashxla_attention_args& args) {
  IndexTensors index = {};
  index.cu_seqlens_q = IndexOf(args.cu_seqlens_q);
  index.cu_seqlens_k = IndexOf(args.cu_seqlens_k);
  index.seqused_k = IndexOf(args.seqused_k);
  index.leftpad_k = IndexOf(args.leftpad_k);
  index.num_seqs = IndexOf(args.num_seqs);
  index.num_sequences = static_cast<int32_t>(args.cu_seqlens_q.shape[0] - 1);
  index.num_tokens = static_cast<int32_t>(args.q.shape[0]);
  CacheView k, v;
  ViewKeys(args, &k, &v);
  index.block_table.num_blocks = static_cast<int32_t>(k.num_blocks);
  index.block_table.block_size = static_cast<int32_t>(k.block_size);
  index.capacity = k.block_size;
  if (args.block_table.data != nullptr) {
    index.block_table.data = static_cast<const int32_t*>(args.block_table.data);
    index.block_table.stride_sequence = args.block_table.stride[0];
    index.block_table.stride_page = args.block_table.stride[1];
    const int64_t width = args.block_table.shape[1];
    const bool dense = args.block_table.stride[1] == 1 &&
                       (args.block_table.stride[0] == width || index.num_sequences == 1);
    index.block_table.num_entries = dense ? index.num_sequences * width : 0;
    index.capacity = width * k.block_size;
  }
  return index;
}

flashxla_kv_cache_args WriteOf(const flashxla_attention_args& args) {
  flashxla_kv_cache_args write = {};
  write.key = args.key, write.value = args.value;
  write.key_cache = args.k, write.value_cache = args.v;
  write.slot_mapping = args.slot_mapping;
  write.k_scale = args.k_descale, write.v_scale = args.v_descale;
  write.layout = args.layout, write.cache_dtype = args.kv_dtype;
  return write;
}

}  // namespace flashxla
