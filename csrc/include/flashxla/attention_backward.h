// flashxla C ABI: the gradients of attention over dense keys and values.
#ifndef FLASHXLA_ATTENTION_BACKWARD_H_
#define FLASHXLA_ATTENTION_BACKWARD_H_

#include "flashxla/operation.h"

// The fields of attention.h keep their meaning; out and lse are what attention computed. With the
// weights p_ij = exp(score_ij - lse_i), of keys that row i sees, 0 where lse_i is -inf:
//   delta_i    = dot(grad_out_i, out_i) - grad_lse_i
//   g_ij       = p_ij * (dot(grad_out_i, v_j) - delta_i)            the gradient of the score
//   g_ij       = g_ij * (1 - tanh(x_ij)^2), x_ij = the score before the softcap / softcap,
//                if softcap > 0
//   grad_q_i   = softmax_scale * sum_j g_ij * k_j
//   grad_k_j   = softmax_scale * sum_i g_ij * q_i                   over all heads of the group
//   grad_v_j   = sum_i p_ij * grad_out_i
//   grad_sinks = -sum_i exp(sink - lse_i) * delta_i                 of each head
// Rows of q outside every sequence and keys outside every sequence have gradients of 0, and what
// they hold does not matter. All elements of the results are written. Keys may belong to several
// sequences: their gradients are the sums. Unless deterministic is 1, a GPU may add up grad_q in
// any order, so that its last bits differ from run to run; a CPU always gives the same bits.
#define FLASHXLA_ATTENTION_BACKWARD_FIELDS(F)                                 \
  F(INPUT, grad_out, NONE)     /* [T, Hq, Dv], out's dtype */                 \
  F(INPUT, grad_lse, NONE)     /* optional float32 [Hq, T] */                 \
  F(INPUT, q, NONE)            /* [T, Hq, Dk] float32, float16, bfloat16 */   \
  F(INPUT, k, NONE)            /* [Tk, Hk, Dk], q's dtype */                  \
  F(INPUT, v, NONE)            /* [Tk, Hk, Dv], q's dtype */                  \
  F(INPUT, out, NONE)          /* [T, Hq, Dv], q's dtype */                   \
  F(INPUT, lse, NONE)          /* float32 [Hq, T] */                          \
  F(INPUT, cu_seqlens_q, NONE) /* int32 [S + 1] */                            \
  F(INPUT, cu_seqlens_k, NONE) /* int32 [S + 1] */                            \
  F(INPUT, seqused_k, NONE)    /* optional int32 [S] */                       \
  F(INPUT, leftpad_k, NONE)    /* optional int32 [S] */                       \
  F(INPUT, num_seqs, NONE)     /* optional int32 [1] */                       \
  F(INPUT, alibi_slopes, NONE) /* optional float32 [Hq] or [S, Hq] */         \
  F(INPUT, sinks, NONE)        /* optional [Hq] float32, float16, bfloat16 */ \
  F(RESULT, grad_q, NONE)      /* as q */                                     \
  F(RESULT, grad_k, NONE)      /* as k */                                     \
  F(RESULT, grad_v, NONE)      /* as v */                                     \
  F(RESULT, grad_sinks, NONE)  /* with sinks: as sinks */                     \
  F(WORKSPACE, workspace, NONE)                                               \
  F(INTEGER, causal, NONE)                                                    \
  F(INTEGER, window_left, NONE)                                               \
  F(INTEGER, window_right, NONE)                                              \
  F(INTEGER, max_seqlen_q, NONE)                                              \
  F(INTEGER, max_seqlen_k, NONE)                                              \
  F(INTEGER, deterministic, NONE) /* 1: the same bits for the same input */   \
  F(REAL, softmax_scale, NONE)                                                \
  F(REAL, softcap, NONE)

FLASHXLA_OPERATION(attention_backward, FLASHXLA_ATTENTION_BACKWARD_FIELDS);

#endif  // FLASHXLA_ATTENTION_BACKWARD_H_
