// Turns an attention call's arguments into the Problem that the kernels see.

#include <algorithm>

#include "common/attention_arguments.h"
#include "cuda/attention/engines.h"
#include "cuda/attention/tensor_map.h"

namespace flashxla::attention {
namespace {

PerHead HeadsOf(const flashxla_tensor& t) {
  const ScaleView view(t);
  return {view.data, view.stride_seq, view.stride_head};
}

Cache CacheOf(const CacheView& view) {
  return {view.data,        view.stride_block, view.stride_token,
          view.stride_head, view.stride_dim,   static_cast<int32_t>(view.head_size)};
}

Rows RowsOf(const flashxla_tensor& t) {
  return {static_cast<char*>(t.data), t.stride[0], t.stride[1], t.stride[2]};
}

// Whether offsets in units of so many bytes fit 32 bits. Those of 16 do in less than 64 GiB.
bool IsNear(const Cache& c, const CacheView& view, int64_t size, int64_t unit) {
  const int64_t last = (view.num_blocks - 1) * c.stride_block +
                       (view.block_size - 1) * c.stride_token +
                       (view.num_heads - 1) * c.stride_head;
  return unit > 0 && c.stride_block >= 0 && c.stride_token >= 0 && c.stride_head >= 0 &&
         last * size / unit < (int64_t{1} << 32);
}

// The most bytes that can be accessed at a time, of elements of `size` bytes: see Problem.
int32_t UnitOf(const Cache& c, int64_t size) {
  const int64_t unit = c.stride_dim == 1 ? UnitOf(c, size, AddressOf(c.data)) : 0;
  return unit >= 4 ? static_cast<int32_t>(unit) : 0;
}
int32_t UnitOf(const Rows& r, int64_t head_size, int64_t size) {
  if (r.stride_dim != 1) return 0;
  const int64_t unit = CommonUnit(
      {AddressOf(r.data), head_size * size, r.stride_token * size, r.stride_head * size});
  return unit >= 4 ? static_cast<int32_t>(unit) : 0;
}

int32_t LogOf(int64_t block_size) {
  for (int32_t shift = 0; shift < 31; ++shift) {
    if (block_size == int64_t{1} << shift) return shift;
  }
  return -1;
}

// From the first element to the last; 0 if some lie before the first.
int64_t BytesOf(const Rows& r, int64_t tokens, int64_t heads, int64_t dims, int64_t dtype) {
  if (tokens == 0 || std::min({r.stride_token, r.stride_head, r.stride_dim}) < 0) return 0;
  const int64_t last =
      (tokens - 1) * r.stride_token + (heads - 1) * r.stride_head + (dims - 1) * r.stride_dim;
  return (last + 1) * ElementSize(dtype);
}

Problem ProblemOf(const flashxla_attention_args& args, const IndexTensors& index) {
  Problem p = {};
  CacheView k, v;
  ViewKeys(args, &k, &v);
  p.q = RowsOf(args.q), p.out = RowsOf(args.out);
  p.lse = static_cast<float*>(args.lse.data);
  p.lse_stride_head = args.lse.stride[0], p.lse_stride_token = args.lse.stride[1];
  p.k = CacheOf(k), p.v = CacheOf(v);
  p.block_table = index.block_table;
  p.index = index;
  p.window = WindowOf(args);
  p.num_tokens = index.num_tokens;
  p.max_queries = args.max_seqlen_q;
  p.num_heads = static_cast<int32_t>(args.q.shape[1]);
  p.num_kv_heads = static_cast<int32_t>(k.num_heads);
  p.group_size = p.num_heads / p.num_kv_heads;
  p.q_bytes = BytesOf(p.q, p.num_tokens, p.num_heads, k.head_size, args.q.dtype);
  p.by_group_size = FastDivide(p.group_size);
  p.block_shift = LogOf(k.block_size);
  p.q_dtype = static_cast<int32_t>(args.q.dtype);
  p.kv_dtype = static_cast<int32_t>(args.kv_dtype);
  p.out_dtype = static_cast<int32_t>(args.out.dtype);
  p.sink_dtype = static_cast<int32_t>(args.sinks.dtype);
  p.batch_invariant = args.batch_invariant != 0;
  p.softmax_scale = static_cast<float>(args.softmax_scale);
  p.softcap = static_cast<float>(args.softcap);
  p.q_descale = HeadsOf(args.q_descale);
  p.k_descale = HeadsOf(args.k_descale);
  p.v_descale = HeadsOf(args.v_descale);
  p.alibi_slopes = HeadsOf(args.alibi_slopes);
  p.sinks = args.sinks.data;
  p.sinks_stride = args.sinks.stride[0];
  const int64_t size = ElementSize(args.kv_dtype);
  p.kv_unit = std::min(UnitOf(p.k, size), UnitOf(p.v, size));
  p.kv_near = IsNear(p.k, k, size, p.kv_unit) && IsNear(p.v, v, size, p.kv_unit);
  const int64_t q_size = ElementSize(args.q.dtype), out_size = ElementSize(args.out.dtype);
  p.q_unit = UnitOf(p.q, k.head_size, q_size), p.out_unit = UnitOf(p.out, v.head_size, out_size);
  p.q_pairs = q_size == 2 && p.q_unit > 0, p.out_pairs = out_size == 2 && p.out_unit > 0;
  p.out_vectors = out_size == 4 && p.out_unit == 16;
  return p;
}

}  // namespace

Facts FactsOf(const flashxla_attention_args& args, bool aligned) {
  flashxla_attention_args known = args;
  if (aligned) {
    alignas(256) static char address;
    known.q.data = known.k.data = known.v.data = known.out.data = &address;
  }
  const IndexTensors index = IndexTensorsOf(known);
  return {ProblemOf(known, index), index.num_sequences, index.capacity};
}

}  // namespace flashxla::attention
