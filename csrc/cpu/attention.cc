// Softmax attention over ragged batches, with dense or paged keys and values.
#include "flashxla/attention.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "common/error.h"
#include "cpu/attention_engine.h"
#include "cpu/attention_problem.h"
#include "cpu/attention_tasks.h"
#include "cpu/guard.h"
#include "cpu/parallel.h"

namespace flashxla {
namespace {

// Rows that one task zeroes.
constexpr int64_t kIdleTokens = 64;

void StoreIdle(const AttentionProblem& problem, const flashxla_context* context) {
  for (const QueryRange& range : problem.idle) {
    const int64_t num_chunks = (range.end - range.begin + kIdleTokens - 1) / kIdleTokens;
    ParallelTasks(context, NumThreads(context), num_chunks, [&](int64_t, int64_t chunk) {
      const int64_t begin = range.begin + chunk * kIdleTokens;
      for (int64_t token = begin; token < std::min(begin + kIdleTokens, range.end); ++token) {
        for (int64_t head = 0; head < problem.num_heads; ++head) {
          StoreZeros(problem, token, head, -std::numeric_limits<float>::infinity());
        }
      }
    });
  }
}

flashxla_status Attend(const flashxla_attention_args& args, const flashxla_context* context) {
  AttentionProblem problem;
  const bool check = context != nullptr && context->check_indices != 0;
  const flashxla_status status = ResolveAttention(args, check, &problem);
  if (status != FLASHXLA_OK) return status;

  const AttentionEngine& engine = GetAttentionEngine();
  const AttentionTasks work = MakeTasks(problem, engine, NumThreads(context));
  const int64_t num_tasks = static_cast<int64_t>(work.tasks.size());
  const int64_t num_workers = std::min(NumThreads(context), num_tasks);
  int64_t scratch_bytes = 0;
  for (const AttentionTask& task : work.tasks) {
    scratch_bytes =
        std::max(scratch_bytes, task.few_rows ? engine.few_rows_scratch_bytes
                                              : engine.tile_scratch_bytes(problem.head_size));
  }
  scratch_bytes = (scratch_bytes + 63) / 64 * 64;
  const std::unique_ptr<void, decltype(&std::free)> scratch(
      num_workers == 0 ? nullptr : std::aligned_alloc(64, num_workers * scratch_bytes), std::free);
  if (scratch == nullptr && num_workers > 0) throw std::bad_alloc();
  std::vector<std::atomic<int64_t>> finished_parts(work.splits.size());

  StoreIdle(problem, context);
  ParallelTasks(context, num_workers, num_tasks, [&](int64_t worker, int64_t i) {
    const AttentionTask& task = work.tasks[i];
    void* memory = static_cast<char*>(scratch.get()) + worker * scratch_bytes;
    (task.few_rows ? engine.attend_few_rows : engine.attend_tiles)(problem, task, memory);
    if (task.split < 0) return;
    const AttentionSplit& split = work.splits[task.split];
    if (finished_parts[task.split].fetch_add(1, std::memory_order_acq_rel) + 1 == split.num_parts) {
      MergeParts(problem, task, work.partials.data() + split.partials, split.num_parts);
    }
  });
  return FLASHXLA_OK;
}

}  // namespace
}  // namespace flashxla

flashxla_status flashxla_cpu_attention(const flashxla_attention_args* args,
                                       const flashxla_context* context) {
  return flashxla::GuardedOnCpu("attention", [&] { return flashxla::Attend(*args, context); });
}
