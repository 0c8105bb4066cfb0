// Softmax attention over ragged batches, with dense or paged keys and values.
#include "flashxla/attention.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

#include "common/attention_arguments.h"
#include "common/needs.h"
#include "cpu/aligned_memory.h"
#include "cpu/attention_engine.h"
#include "cpu/attention_problem.h"
#include "cpu/attention_tasks.h"
#include "cpu/denormals.h"
#include "cpu/guard.h"
#include "cpu/parallel.h"

namespace flashxla {
namespace {

// Tokens per task that zeroes rows without a sequence.
constexpr int64_t kIdleTokens = 64;

void StoreIdle(const AttentionProblem& problem, const flashxla_context* context) {
  for (const QueryRange& range : problem.idle) {
    ParallelChunks(context, range.begin, range.end, kIdleTokens, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        for (int64_t head = 0; head < problem.num_heads; ++head) {
          StoreZeros(problem, token, head, -std::numeric_limits<float>::infinity());
        }
      }
    });
  }
}

// Writes the new keys and values into the cache.
flashxla_status Write(const AttentionProblem& problem, const flashxla_context* context) {
  flashxla_kv_cache_args write = WriteOf(*problem.args);
  std::vector<int64_t> slots;
  if (write.slot_mapping.data == nullptr) {
    const IndexTensors index = IndexTensorsOf(*problem.args);
    slots.assign(std::max<int64_t>(problem.num_tokens, 1), -1);
    for (const ListedSequence& sequence : problem.sequences) {
      for (int64_t i = 0; i < sequence.num_queries; ++i) {
        slots[sequence.first_query + i] = SlotOfQuery(index, sequence.index, sequence, i);
      }
    }
    write.slot_mapping = {slots.data(), FLASHXLA_I64, 1, {problem.num_tokens}, {1}};
  }
  return flashxla_cpu_kv_cache(&write, context);
}

void RunTasks(const AttentionProblem& problem, const flashxla_context* context) {
  const AttentionEngines& engines = GetAttentionEngines();
  const AttentionTasks work = MakeTasks(problem, engines, NumThreads(context));
  const int64_t num_tasks = static_cast<int64_t>(work.tasks.size());
  const int64_t num_workers = std::min(NumThreads(context), num_tasks);
  auto engine_of = [&](const AttentionTask& task) -> const AttentionEngine& {
    return task.few_rows ? engines.few_rows : engines.tiles;
  };
  int64_t scratch_bytes = 0;
  for (const AttentionTask& task : work.tasks) {
    scratch_bytes = std::max(scratch_bytes, engine_of(task).scratch_bytes(problem));
  }
  scratch_bytes = RoundUp(scratch_bytes, kAlignment);
  const AlignedMemory scratch = AllocateAligned(num_workers * scratch_bytes);
  std::vector<std::atomic<int64_t>> finished_parts(work.splits.size());

  StoreIdle(problem, context);
  ParallelTasks(context, num_workers, num_tasks, [&](int64_t worker, int64_t i) {
    const DenormalsAreZero denormals;
    const AttentionTask& task = work.tasks[i];
    engine_of(task).attend(problem, task, scratch.get() + worker * scratch_bytes);
    if (task.split < 0) return;
    const AttentionSplit& split = work.splits[task.split];
    if (finished_parts[task.split].fetch_add(1, std::memory_order_acq_rel) + 1 == split.num_parts) {
      CombineParts(problem, task, work.partials.data() + split.partials, split.num_parts);
    }
  });
}

// On a CPU a call makes its own plan and allocates its own memory, so it needs neither from
// outside.
flashxla_status Needs(const AttentionProblem& problem, flashxla_needs* needs) {
  *needs = {};
  const AttentionEngines& engines = GetAttentionEngines();
  const char* why_not_few = WhyNoFewRows(engines, problem);
  const AttentionEngine& few = why_not_few[0] ? engines.tiles : engines.few_rows;
  const int64_t longest = std::min(problem.args->max_seqlen_q, problem.num_tokens);
  if (longest * problem.group_size <= engines.max_few_rows || why_not_few[0]) {
    AddKernel(needs, {"all queries", few.name, few.description, why_not_few});
  } else {
    AddKernel(needs, {"few queries", few.name, few.description, ""});
    AddKernel(needs, {"many queries", engines.tiles.name, engines.tiles.description, ""});
  }
  return FLASHXLA_OK;
}

flashxla_status Attend(const flashxla_attention_args& args, const flashxla_context* context) {
  AttentionProblem problem;
  if (const flashxla_status status = ResolveAttention(args, &problem); status != FLASHXLA_OK) {
    return status;
  }
  if (context != nullptr && context->needs != nullptr) return Needs(problem, context->needs);
  if (context != nullptr && context->prepare != 0) return FLASHXLA_OK;
  const bool check = context != nullptr && context->check_indices != 0;
  if (const flashxla_status status = ResolveSequences(check, &problem); status != FLASHXLA_OK) {
    return status;
  }
  if (args.key.data != nullptr) {
    if (const flashxla_status status = Write(problem, context); status != FLASHXLA_OK) {
      return status;
    }
  }
  RunTasks(problem, context);
  return FLASHXLA_OK;
}

}  // namespace
}  // namespace flashxla

flashxla_status flashxla_cpu_attention(const flashxla_attention_args* args,
                                       const flashxla_context* context) {
  return flashxla::GuardedOnCpu(
      "attention", [&] { return flashxla::Attend(flashxla::Unpacked(*args), context); });
}
