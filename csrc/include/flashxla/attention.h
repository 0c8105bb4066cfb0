// flashxla C ABI: softmax attention over ragged batches, with dense or paged keys and values.
#ifndef FLASHXLA_ATTENTION_H_
#define FLASHXLA_ATTENTION_H_

#include "flashxla/common.h"

#ifdef __cplusplus
extern "C" {
#endif

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
// Index tensors may hold anything; nothing outside the given buffers is touched:
//   num_seqs         clamped to [0, S]
//   cu_seqlens_q     a sequence whose [start, end) is not within [0, T], or starts before the end
//   of
//                    an earlier sequence, is skipped: its rows count as outside every sequence
//   cu_seqlens_k     a sequence whose [start, end) is not within [0, Tk] is skipped likewise
//   seqused_k        negative: the sequence is skipped; longer than the table or the keys: the keys
//                    that do not exist are skipped, the alignment stays
//   block_table      an entry outside [0, P): the keys of that page are skipped
//   leftpad_k        negative counts as 0
typedef struct flashxla_attention_args {
  flashxla_tensor q;             // [T, Hq, D] f32, f16, bf16, f8e4m3, f8e5m2
  flashxla_tensor k;             // dense [Tk, Hk, D]; paged by layout (one-tensor layouts: K and V)
  flashxla_tensor v;             // as k; absent for one-tensor layouts
  flashxla_tensor cu_seqlens_q;  // i32 [S + 1]
  flashxla_tensor cu_seqlens_k;  // optional i32 [S + 1]
  flashxla_tensor seqused_k;     // optional i32 [S]
  flashxla_tensor leftpad_k;     // optional i32 [S]
  flashxla_tensor block_table;   // optional i32 [S, M]
  flashxla_tensor num_seqs;      // optional i32 [1]
  flashxla_tensor alibi_slopes;  // optional f32 [Hq] or [S, Hq]
  flashxla_tensor sinks;         // optional f32, f16, bf16 [Hq]
  flashxla_tensor q_descale;     // optional f32 [1], [Hk] or [S, Hk]
  flashxla_tensor k_descale;     // optional f32 [1], [Hk] or [S, Hk]
  flashxla_tensor v_descale;     // optional f32 [1], [Hk] or [S, Hk]
  flashxla_tensor plan;          // cuda: optional i32 [plan_words] of flashxla_cuda_attention_plan
  flashxla_tensor out;           // [T, Hq, D] q's dtype, bf16 for an f8 q
  flashxla_tensor lse;           // optional f32 [Hq, T]
  flashxla_tensor workspace;     // cuda: u8 [workspace_bytes]
  int64_t layout;                // flashxla_layout of a paged cache
  int64_t kv_dtype;              // flashxla_dtype of a K/V element (never U8)
  int64_t causal;                // 0 or 1
  int64_t window_left;           // -1: unlimited
  int64_t window_right;          // -1: unlimited
  int64_t max_seqlen_q;          // upper bounds, known before the lengths are
  int64_t max_seqlen_k;
  int64_t engines;  // cuda: those of the plan, if one is given (flashxla_attention_needs)
  double softmax_scale;
  double softcap;  // 0: none
} flashxla_attention_args;

FLASHXLA_EXPORT flashxla_status flashxla_cpu_attention(const flashxla_attention_args* args,
                                                       const flashxla_context* context);
FLASHXLA_EXPORT flashxla_status flashxla_cuda_attention(const flashxla_attention_args* args,
                                                        const flashxla_context* context);

// What a call on a GPU needs, from what is known before the index tensors are: shapes, strides,
// dtypes, attributes. `args` names the tensors that are present by any address; none is read.
typedef struct flashxla_attention_needs {
  int64_t plan_words;        // of the plan
  int64_t workspace_bytes;   // without a plan; a call that is given none makes it in its workspace
  int64_t engines;           // attribute of the plan: which engines serve the call
  const char* few_queries;   // engine of sequences with few queries (decode), by name
  const char* many_queries;  // engine of the others (prefill)
  const char* reason;        // why many_queries is not the fastest one; empty if it is
} flashxla_attention_needs;

FLASHXLA_EXPORT flashxla_status flashxla_cuda_attention_needs(const flashxla_attention_args* args,
                                                              flashxla_attention_needs* needs);

// The work lists of an attention call. They depend on nothing but the index tensors and the sizes
// below, so that the layers of a model, which share those, share the plan.
typedef struct flashxla_attention_plan_args {
  flashxla_tensor cu_seqlens_q;
  flashxla_tensor cu_seqlens_k;
  flashxla_tensor seqused_k;
  flashxla_tensor leftpad_k;
  flashxla_tensor block_table;
  flashxla_tensor num_seqs;
  flashxla_tensor plan;  // i32 [plan_words]
  int64_t engines;       // of flashxla_attention_needs
  int64_t num_tokens;    // T
  int64_t num_heads;     // Hq
  int64_t num_kv_heads;  // Hk
  int64_t num_blocks;    // P; dense: 1
  int64_t block_size;    // B; dense: Tk
  int64_t causal;
  int64_t window_left;
  int64_t window_right;
} flashxla_attention_plan_args;

FLASHXLA_EXPORT flashxla_status flashxla_cuda_attention_plan(
    const flashxla_attention_plan_args* args, const flashxla_context* context);

#ifdef __cplusplus
}
#endif

#endif  // FLASHXLA_ATTENTION_H_
