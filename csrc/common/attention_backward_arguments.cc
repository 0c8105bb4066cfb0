#include "common/attention_backward_arguments.h"

#include <algorithm>

#include "common/error.h"

namespace flashxla {
namespace {

bool IsLike(const flashxla_tensor& t, const flashxla_tensor& other) {
  return t.dtype == other.dtype && t.rank == other.rank &&
         std::equal(t.shape, t.shape + t.rank, other.shape);
}

flashxla_status Refuse(const char* what) {
  return SetError(FLASHXLA_INVALID_ARGUMENT, "attention_backward: %s", what);
}

bool IsLse(const flashxla_tensor& t, const flashxla_tensor& q) {
  return t.dtype == FLASHXLA_F32 && t.rank == 2 && t.shape[0] == q.shape[1] &&
         t.shape[1] == q.shape[0];
}

}  // namespace

flashxla_attention_args ForwardOf(const flashxla_attention_backward_args& args) {
  flashxla_attention_args forward = {};
  forward.q = args.q, forward.k = args.k, forward.v = args.v;
  forward.cu_seqlens_q = args.cu_seqlens_q, forward.cu_seqlens_k = args.cu_seqlens_k;
  forward.seqused_k = args.seqused_k, forward.leftpad_k = args.leftpad_k;
  forward.num_seqs = args.num_seqs;
  forward.alibi_slopes = args.alibi_slopes, forward.sinks = args.sinks;
  forward.out = args.out, forward.lse = args.lse;
  forward.layout = FLASHXLA_NHD, forward.kv_dtype = args.k.dtype;
  forward.causal = args.causal;
  forward.window_left = args.window_left, forward.window_right = args.window_right;
  forward.max_seqlen_q = args.max_seqlen_q, forward.max_seqlen_k = args.max_seqlen_k;
  forward.softmax_scale = args.softmax_scale, forward.softcap = args.softcap;
  return forward;
}

flashxla_status CheckAttentionBackwardArguments(const flashxla_attention_backward_args& args) {
  const int64_t dtype = args.q.dtype;
  if (dtype != FLASHXLA_F32 && dtype != FLASHXLA_F16 && dtype != FLASHXLA_BF16) {
    return Refuse("unsupported dtype");
  }
  if (args.k.dtype != dtype || args.v.dtype != dtype || args.out.dtype != dtype) {
    return Refuse("q, k, v and out are not of one dtype");
  }
  if (!IsLike(args.grad_out, args.out) || !IsLse(args.lse, args.q) ||
      (args.grad_lse.data != nullptr && !IsLse(args.grad_lse, args.q))) {
    return Refuse("grad_out, lse and grad_lse do not go with q and out");
  }
  if (!IsLike(args.grad_q, args.q) || !IsLike(args.grad_k, args.k) ||
      !IsLike(args.grad_v, args.v)) {
    return Refuse("the gradients are not like what they are of");
  }
  if (args.grad_sinks.data != nullptr &&
      (args.sinks.data == nullptr || args.sinks.rank != 1 ||
       args.sinks.shape[0] != args.q.shape[1] || !IsLike(args.grad_sinks, args.sinks))) {
    return Refuse("grad_sinks does not go with sinks and q");
  }
  return FLASHXLA_OK;
}

}  // namespace flashxla
