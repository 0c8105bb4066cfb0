// Reading rows of queries, writing rows of outputs, and combining partial results.
#include <cmath>
#include <cstring>
#include <limits>

#include "common/attention_arguments.h"
#include "common/math_constants.h"
#include "cpu/attention_engine.h"
#include "cpu/attention_tasks.h"
#include "cpu/row_converter.h"

namespace flashxla {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

char* RowAt(const RowView& view, int64_t token, int64_t head) {
  return view.data +
         (token * view.stride_token + head * view.stride_head) * ElementSize(view.dtype);
}

void StoreOut(const AttentionProblem& problem, int64_t token, int64_t head, const float* values,
              float factor) {
  WriteRow(problem.out, token, head, problem.v_head_size, values, factor);
}

}  // namespace

void ReadRow(const RowView& view, int64_t token, int64_t head, int64_t n, float* values) {
  GetRowConverter(view.dtype, FLASHXLA_F32)(RowAt(view, token, head), view.stride_dim,
                                            reinterpret_cast<char*>(values), 1, n, 1.0f);
}

void WriteRow(const RowView& view, int64_t token, int64_t head, int64_t n, const float* values,
              float factor) {
  float scaled[kMaxHeadSize];
  for (int64_t i = 0; i < n; ++i) scaled[i] = values[i] * factor;
  GetRowConverter(FLASHXLA_F32, view.dtype)(reinterpret_cast<const char*>(scaled), 1,
                                            RowAt(view, token, head), view.stride_dim, n, 1.0f);
}

void LoadQuery(const AttentionProblem& problem, const AttentionTask& task, int64_t kv_head,
               int64_t row, float* values) {
  const int64_t token = task.sequence->first_query + row / problem.group_size;
  const int64_t head = kv_head * problem.group_size + row % problem.group_size;
  ReadRow(problem.q, token, head, problem.head_size, values);
}

void FinishRow(const AttentionProblem& problem, const AttentionTask& task, int64_t kv_head,
               int64_t row, const float* values, RowState state) {
  if (task.partial != nullptr) {
    const int64_t index =
        (kv_head - task.kv_head_begin) * (task.row_end - task.row_begin) + row - task.row_begin;
    float* partial = task.partial + index * PartialStride(problem);
    partial[0] = state.row_max;
    partial[1] = state.row_sum;
    std::memcpy(partial + 2, values, problem.v_head_size * sizeof(float));
    return;
  }
  const int64_t token = task.sequence->first_query + row / problem.group_size;
  const int64_t head = kv_head * problem.group_size + row % problem.group_size;
  const float sink = problem.Sink(head);
  if (state.row_sum == 0.0f) {  // no key was seen, or only keys of score -inf
    StoreZeros(problem, token, head, sink);
    return;
  }
  float factor = 1.0f, total = state.row_sum, row_max = state.row_max;
  if (sink != -kInfinity) {
    const float score = sink * kLog2e;
    row_max = std::fmax(state.row_max, score);
    factor = std::exp2(state.row_max - row_max);
    total = state.row_sum * factor + std::exp2(score - row_max);
  }
  StoreOut(problem, token, head, values,
           factor / total * problem.ValueScale(*task.sequence, kv_head));
  problem.StoreLse(token, head, row_max * kLn2 + std::log(total));
}

void StoreZeros(const AttentionProblem& problem, int64_t token, int64_t head, float lse) {
  static constexpr float kZeros[kMaxValueHeadSize] = {};
  StoreOut(problem, token, head, kZeros, 1.0f);
  problem.StoreLse(token, head, lse);
}

void CombineParts(const AttentionProblem& problem, const AttentionTask& task, const float* partials,
                  int64_t num_parts) {
  const int64_t stride = PartialStride(problem);
  const int64_t part_stride = PartSize(problem, task);
  AttentionTask whole = task;
  whole.partial = nullptr;
  for (int64_t kv_head = task.kv_head_begin; kv_head < task.kv_head_end; ++kv_head) {
    for (int64_t row = task.row_begin; row < task.row_end; ++row, partials += stride) {
      float values[kMaxValueHeadSize] = {};
      RowState state = {-kInfinity, 0.0f};
      for (int64_t p = 0; p < num_parts; ++p) {
        state.row_max = std::fmax(state.row_max, partials[p * part_stride]);
      }
      for (int64_t p = 0; p < num_parts; ++p) {
        const float* part = partials + p * part_stride;
        if (part[1] == 0.0f) continue;  // it saw no key
        const float factor = std::exp2(part[0] - state.row_max);
        state.row_sum += part[1] * factor;
        for (int64_t d = 0; d < problem.v_head_size; ++d) values[d] += part[2 + d] * factor;
      }
      FinishRow(problem, whole, kv_head, row, values, state);
    }
  }
}

}  // namespace flashxla
