// Softmax attention over ragged batches, with dense or paged keys and values.
#include "flashxla/attention.h"

#include <cmath>
#include <limits>
#include <new>

#include "common/error.h"
#include "cpu/attention_problem.h"
#include "cpu/dtypes.h"
#include "cpu/parallel.h"

namespace flashxla {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

void LoadRow(const char* data, int64_t dtype, int64_t stride, int64_t n, float* row) {
  WithFormat(dtype, [&](auto format) {
    using Format = decltype(format);
    const auto* src = reinterpret_cast<const typename Format::Bits*>(data);
    for (int64_t i = 0; i < n; ++i) row[i] = Format::Decode(src[i * stride]);
  });
}

void StoreRow(const float* row, int64_t dtype, int64_t stride, int64_t n, char* data) {
  WithFormat(dtype, [&](auto format) {
    using Format = decltype(format);
    auto* dst = reinterpret_cast<typename Format::Bits*>(data);
    for (int64_t i = 0; i < n; ++i) dst[i * stride] = Format::Encode(row[i]);
  });
}

char* RowAt(const QueryView& view, int64_t token, int64_t head) {
  return view.data +
         (token * view.stride_token + head * view.stride_head) * ElementSize(view.dtype);
}

void AttendRow(const AttentionProblem& problem, const Sequence& sequence, int64_t i, int64_t head) {
  const int64_t kv_head = head / problem.group_size, token = sequence.first_query + i;
  const float scale = problem.ScoreScale(sequence, kv_head);
  const float softcap = static_cast<float>(problem.args->softcap);
  const float slope = problem.AlibiSlope(sequence, head);
  const int64_t diagonal = i + sequence.length - sequence.num_queries;
  float q[256], k[256], v[256], out[256] = {};
  LoadRow(RowAt(problem.q, token, head), problem.q.dtype, problem.q.stride_dim, problem.head_size,
          q);
  float top = -kInfinity, sum = 0.0f;
  KeyRange range = problem.Visible(sequence, i);
  KeyList list;
  while (range.begin < range.end) {
    problem.ListKeys(sequence, kv_head, &range.begin, range.end, KeyList::kMaxKeys, &list);
    for (int64_t j = 0; j < list.size; ++j) {
      LoadRow(list.key[j], problem.args->kv_dtype, problem.k.stride_dim, problem.head_size, k);
      LoadRow(list.value[j], problem.args->kv_dtype, problem.v.stride_dim, problem.head_size, v);
      float score = 0.0f;
      for (int64_t d = 0; d < problem.head_size; ++d) score += q[d] * k[d];
      score *= scale;
      if (softcap > 0.0f) score = softcap * std::tanh(score / softcap);
      score -= slope * std::fabs(static_cast<float>(diagonal - list.position[j]));
      const float new_top = std::max(top, score);
      const float base = new_top == -kInfinity ? 0.0f : new_top;
      const float decay = std::exp(top - base), weight = std::exp(score - base);
      sum = sum * decay + weight;
      for (int64_t d = 0; d < problem.head_size; ++d) out[d] = out[d] * decay + weight * v[d];
      top = new_top;
    }
  }
  const float sink = problem.Sink(head);
  const float value_scale = problem.ValueScale(sequence, kv_head);
  float lse = sink;
  if (sum == 0.0f) {
    for (int64_t d = 0; d < problem.head_size; ++d) out[d] = 0.0f;
  } else {
    const float new_top = std::max(top, sink);
    const float total = sum * std::exp(top - new_top) + std::exp(sink - new_top);
    lse = new_top + std::log(total);
    const float factor = std::exp(top - new_top) / total * value_scale;
    for (int64_t d = 0; d < problem.head_size; ++d) out[d] *= factor;
  }
  StoreRow(out, problem.out.dtype, problem.out.stride_dim, problem.head_size,
           RowAt(problem.out, token, head));
  problem.StoreLse(token, head, lse);
}

flashxla_status Attend(const flashxla_attention_args& args, const flashxla_context* context) {
  AttentionProblem problem;
  const bool check = context != nullptr && context->check_indices != 0;
  const flashxla_status status = ResolveAttention(args, check, &problem);
  if (status != FLASHXLA_OK) return status;
  const float zeros[256] = {};
  for (const QueryRange& range : problem.idle) {
    for (int64_t token = range.begin; token < range.end; ++token) {
      for (int64_t head = 0; head < problem.num_heads; ++head) {
        StoreRow(zeros, problem.out.dtype, problem.out.stride_dim, problem.head_size,
                 RowAt(problem.out, token, head));
        problem.StoreLse(token, head, -kInfinity);
      }
    }
  }
  for (const Sequence& sequence : problem.sequences) {
    const int64_t rows = sequence.num_queries * problem.num_heads;
    ParallelFor(context, rows, [&](int64_t row) {
      AttendRow(problem, sequence, row / problem.num_heads, row % problem.num_heads);
    });
  }
  return FLASHXLA_OK;
}

}  // namespace
}  // namespace flashxla

flashxla_status flashxla_cpu_attention(const flashxla_attention_args* args,
                                       const flashxla_context* context) {
  try {
    return flashxla::Attend(*args, context);
  } catch (const std::bad_alloc&) {
    return flashxla::SetError(FLASHXLA_OUT_OF_MEMORY, "attention: out of memory");
  }
}
