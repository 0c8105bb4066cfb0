// flashxla C ABI: softmax attention over ragged batches, with dense or paged keys and values.
#ifndef FLASHXLA_ATTENTION_H_
#define FLASHXLA_ATTENTION_H_

#include "flashxla/operation.h"

// Sequence s has queries q[cu_seqlens_q[s] : cu_seqlens_q[s + 1]] (len_q of them) and len_k keys:
//   dense  (no block_table): k[cu_seqlens_k[s] : ...]; len_k = seqused_k[s], else the difference
//   paged  (block_table):    key j is at block_table[s, j / B], offset j % B; len_k = seqused_k[s]
// For query i and key j of a sequence, d = i + len_k - len_q - j is their distance, and
//   score = softmax_scale * q_descale * k_descale * dot(q_i, k_j)
//   score = softcap * tanh(score / softcap)                              if softcap > 0
//   score = score - alibi_slope * |d|                                    if alibi_slopes
//   key j is seen if j >= leftpad_k, d >= 0 (causal), d <= window_left and -d <= window_right
// out_i = sum_j softmax(score)_j * v_j * v_descale; a sink adds exp(sink) to the denominator.
// lse = log(sum_j exp(score_j) + exp(sink)), natural. A row that sees no key: out 0, lse = sink or
// -inf. Rows of q outside every sequence: out 0, lse -inf. All rows of out and lse are written.
//
// With batch_invariant the bits of a row of out and of lse depend on nothing but its query, the
// keys and values that it sees with their positions, the slopes and sinks of its head, and the
// call's dtypes, head sizes and scalars: not on other sequences, on other queries of its own, on
// pages, or on the number of threads.
//
// With `key` and `value` (paged keys only) these are first written into the caches k and v, as
// flashxla_kv_cache does, with k_descale and v_descale as its scales. Row t goes to slot
// slot_mapping[t]; without slot_mapping, the rows of a sequence's queries are its last len_q keys,
// and go where block_table has those. A token without a place is not written.
//
// With `qkv` in place of q, key and value, each token's heads are its queries, keys and values, one
// after the other.
//
// Index tensors may hold anything, but must not change during a call; nothing outside the given
// buffers is touched:
//   num_seqs         clamped to [0, S]
//   cu_seqlens_q     a sequence whose [start, end) is not within [0, T], or starts before the end
//                    of an earlier sequence, is skipped: its rows count as outside every sequence
//   cu_seqlens_k     a sequence whose [start, end) is not within [0, Tk] is skipped likewise
//   seqused_k        negative: the sequence is skipped; longer than the table or the keys: the keys
//                    that do not exist are skipped, the alignment stays
//   block_table      an entry outside [0, P): the keys of that page are skipped
//   leftpad_k        negative counts as 0
#define FLASHXLA_ATTENTION_FIELDS(F)                                                               \
  F(INPUT, q, STATIC)            /* [T, Hq, Dk] float32, float16, bfloat16, or fp8 */              \
  F(INPUT, k, STATIC)            /* [Tk, Hk, Dk]; paged by layout, one-tensor layouts here */      \
  F(INPUT, v, STATIC)            /* [Tk, Hk, Dv]; absent for one-tensor layouts */                 \
  F(INPUT, key, STATIC)          /* optional [T, Hk, Dk]: written into k, which is updated */      \
  F(INPUT, value, STATIC)        /* with key: [T, Hk, Dv], key's dtype; v is updated */            \
  F(INPUT, qkv, STATIC)          /* in place of q, key, value: [T, Hq + 2 Hk, D]; D = Dk = Dv */   \
  F(INPUT, slot_mapping, STATIC) /* with key, optional: int32 or int64 [N], N <= T */              \
  F(INPUT, cu_seqlens_q, READ)   /* int32 [S + 1] */                                               \
  F(INPUT, cu_seqlens_k, READ)   /* dense: int32 [S + 1] */                                        \
  F(INPUT, seqused_k, READ)      /* paged: int32 [S]; dense: optional */                           \
  F(INPUT, leftpad_k, READ)      /* optional int32 [S] */                                          \
  F(INPUT, block_table, READ)    /* paged: int32 [S, M] */                                         \
  F(INPUT, num_seqs, READ)       /* optional int32 [1] */                                          \
  F(INPUT, alibi_slopes, STATIC) /* optional float32 [Hq] or [S, Hq] */                            \
  F(INPUT, sinks, NONE)          /* optional [Hq] float32, float16, bfloat16 */                    \
  F(INPUT, q_descale, NONE)      /* optional float32 [1], [Hk] or [S, Hk] */                       \
  F(INPUT, k_descale, NONE)      /* optional float32 [1], [Hk] or [S, Hk]; with key not [S, Hk] */ \
  F(INPUT, v_descale, NONE)      /* as k_descale */                                                \
  F(RESULT, out, STATIC)         /* [T, Hq, Dv] q's dtype, bfloat16 for an fp8 q */                \
  F(RESULT, lse, NONE)           /* optional float32 [Hq, T] */                                    \
  F(PLAN, plan, NONE)                                                                              \
  F(WORKSPACE, workspace, NONE)                                                                    \
  F(LAYOUT, layout, STATIC)        /* of paged keys and values */                                  \
  F(DTYPE, kv_dtype, STATIC)       /* of an element of k and v: never uint8 */                     \
  F(INTEGER, causal, STATIC)       /* 0 or 1 */                                                    \
  F(INTEGER, window_left, STATIC)  /* -1: unlimited */                                             \
  F(INTEGER, window_right, STATIC) /* -1: unlimited */                                             \
  F(INTEGER, max_seqlen_q, STATIC) /* upper bounds, known before the lengths are */                \
  F(INTEGER, max_seqlen_k, STATIC)                                                                 \
  F(INTEGER, batch_invariant, STATIC) /* 0 or 1 */                                                 \
  F(REAL, softmax_scale, NONE)                                                                     \
  F(REAL, softcap, NONE) /* 0: none */

FLASHXLA_OPERATION(attention, FLASHXLA_ATTENTION_FIELDS);

#endif  // FLASHXLA_ATTENTION_H_
