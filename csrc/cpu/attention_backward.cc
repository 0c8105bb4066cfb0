// The gradients of attention over dense keys and values.
#include "flashxla/attention_backward.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "common/attention_arguments.h"
#include "common/needs.h"
#include "cpu/aligned_memory.h"
#include "cpu/attention_engine.h"
#include "cpu/denormals.h"
#include "cpu/dtypes.h"
#include "cpu/guard.h"
#include "cpu/parallel.h"

namespace flashxla {
namespace {

// Rows per task that writes zeros, or adds up what several tasks have found.
constexpr int64_t kRowsPerTask = 64;

// Writes zeros to rows [begin, end) of all heads.
void WriteZeros(const RowView& view, int64_t num_heads, int64_t head_size, int64_t begin,
                int64_t end, const flashxla_context* context) {
  static constexpr float kZeros[kMaxHeadSize] = {};
  ParallelChunks(context, begin, end, kRowsPerTask, [&](int64_t first, int64_t behind) {
    for (int64_t row = first; row < behind; ++row) {
      for (int64_t head = 0; head < num_heads; ++head) {
        WriteRow(view, row, head, head_size, kZeros, 1.0f);
      }
    }
  });
}

// Gradients of queries outside every sequence, and of keys that no sequence has.
void WriteIdle(const AttentionBackwardProblem& problem, const std::vector<KeyCluster>& clusters,
               const flashxla_context* context) {
  const AttentionProblem& forward = problem.forward;
  for (const QueryRange& range : forward.idle) {
    WriteZeros(problem.grad_q, forward.num_heads, forward.head_size, range.begin, range.end,
               context);
  }
  int64_t row = 0;
  auto write = [&](int64_t end) {
    if (row >= end) return;
    WriteZeros(problem.grad_k, forward.num_kv_heads, forward.head_size, row, end, context);
    WriteZeros(problem.grad_v, forward.num_kv_heads, forward.v_head_size, row, end, context);
  };
  for (const KeyCluster& cluster : clusters) {
    write(cluster.first_row);
    row = cluster.end_row;
  }
  write(problem.args->k.shape[0]);
}

class Backward {
 public:
  Backward(const AttentionBackwardProblem& problem, const flashxla_context* context)
      : problem_(problem),
        forward_(problem.forward),
        context_(context),
        engine_(GetAttentionEngines().backward),
        work_(MakeBackwardTasks(problem, engine_.max_rows(forward_), engine_.panel_rows,
                                NumThreads(context))),
        num_workers_(std::min(NumThreads(context), static_cast<int64_t>(work_.tasks.size()))),
        key_stride_(RoundUp(forward_.head_size, kGradientBlock)),
        value_stride_(RoundUp(forward_.v_head_size, kGradientBlock)),
        grad_sinks_(work_.tasks.size() * forward_.group_size) {
    Place();
  }

  void Run() {
    WriteIdle(problem_, work_.clusters, context_);
    std::vector<int64_t> order(work_.tasks.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [this](int64_t a, int64_t b) {
      return work_.tasks[a].cost > work_.tasks[b].cost;
    });
    ParallelTasks(context_, num_workers_, static_cast<int64_t>(order.size()),
                  [&](int64_t worker, int64_t i) { RunTask(worker, order[i]); });
    AddParts();
    WriteSinks();
  }

 private:
  static int64_t SumRows(const BackwardTask& task) {
    return task.end_row - task.first_row + kGradientSpareRows;
  }
  // Floats of a task's sums.
  int64_t SumsSize(const BackwardTask& task) const {
    return SumRows(task) * (key_stride_ + value_stride_);
  }

  // Each worker has scratch memory, and room for the sums of a task that is alone. Parts have room
  // of their own, since their sums are added up later.
  void Place() {
    scratch_bytes_ = RoundUp(engine_.scratch_bytes(forward_), kAlignment);
    int64_t largest = 0, parts = 0;
    for (const BackwardTask& task : work_.tasks) {
      if (task.num_parts == 1) {
        largest = std::max(largest, SumsSize(task));
      } else {
        parts += SumsSize(task);
      }
    }
    worker_bytes_ = scratch_bytes_ + RoundUp(largest * 4, kAlignment);
    memory_ = AllocateAligned(num_workers_ * worker_bytes_ + RoundUp(parts * 4, kAlignment));
    float* next = reinterpret_cast<float*>(memory_.get() + num_workers_ * worker_bytes_);
    part_sums_.resize(work_.tasks.size());
    for (size_t i = 0; i < work_.tasks.size(); ++i) {
      if (work_.tasks[i].num_parts == 1) continue;
      part_sums_[i] = next;
      next += SumsSize(work_.tasks[i]);
    }
  }

  KeyGradients SumsAt(const BackwardTask& task, float* memory) const {
    return {memory, memory + SumRows(task) * key_stride_, task.first_row, key_stride_,
            value_stride_};
  }

  void RunTask(int64_t worker, int64_t i) {
    const DenormalsAreZero denormals;
    const BackwardTask& task = work_.tasks[i];
    char* const scratch = memory_.get() + worker * worker_bytes_;
    float* const memory =
        task.num_parts == 1 ? reinterpret_cast<float*>(scratch + scratch_bytes_) : part_sums_[i];
    std::memset(memory, 0, SumsSize(task) * sizeof(float));
    const KeyGradients sums = SumsAt(task, memory);
    for (int64_t block = task.block_begin; block < task.block_end; ++block) {
      engine_.run(problem_, work_.blocks[block], task.kv_head, sums,
                  grad_sinks_.data() + i * forward_.group_size, scratch);
    }
    if (task.num_parts > 1) return;
    const KeyCluster& cluster = work_.clusters[task.cluster];
    WriteKeys(&task, &memory, cluster.first_row, cluster.end_row);
  }

  // Writes the gradients of the keys of clusters that several tasks have shared.
  void AddParts() {
    struct Chunk {
      int64_t first_task, begin, end;
    };
    std::vector<Chunk> chunks;
    const int64_t num_tasks = static_cast<int64_t>(work_.tasks.size());
    for (int64_t i = 0; i < num_tasks; i += work_.tasks[i].num_parts) {
      if (work_.tasks[i].num_parts == 1) continue;
      const KeyCluster& cluster = work_.clusters[work_.tasks[i].cluster];
      for (int64_t row = cluster.first_row; row < cluster.end_row; row += kRowsPerTask) {
        chunks.push_back({i, row, std::min(row + kRowsPerTask, cluster.end_row)});
      }
    }
    ParallelTasks(context_, NumThreads(context_), static_cast<int64_t>(chunks.size()),
                  [&](int64_t, int64_t i) {
                    const Chunk& chunk = chunks[i];
                    WriteKeys(&work_.tasks[chunk.first_task], &part_sums_[chunk.first_task],
                              chunk.begin, chunk.end);
                  });
  }

  // Writes rows [begin, end) of the gradients of keys and values: the sums of all parts of a task,
  // in their order, so that the bits do not depend on which was done first.
  void WriteKeys(const BackwardTask* parts, float* const* memory, int64_t begin,
                 int64_t end) const {
    const float scale = static_cast<float>(problem_.args->softmax_scale);
    const int64_t head = parts->kv_head;
    for (int64_t row = begin; row < end; ++row) {
      float keys[kMaxHeadSize] = {}, values[kMaxValueHeadSize] = {};
      for (int64_t part = 0; part < parts->num_parts; ++part) {
        const BackwardTask& task = parts[part];
        if (row < task.first_row || row >= task.end_row) continue;
        const KeyGradients sums = SumsAt(task, memory[part]);
        const float* k = sums.keys + (row - sums.first_row) * sums.key_stride;
        const float* v = sums.values + (row - sums.first_row) * sums.value_stride;
        for (int64_t d = 0; d < forward_.head_size; ++d) keys[d] += k[d];
        for (int64_t d = 0; d < forward_.v_head_size; ++d) values[d] += v[d];
      }
      WriteRow(problem_.grad_k, row, head, forward_.head_size, keys, scale);
      WriteRow(problem_.grad_v, row, head, forward_.v_head_size, values, 1.0f);
    }
  }

  void WriteSinks() const {
    const flashxla_tensor& t = problem_.args->grad_sinks;
    if (t.data == nullptr) return;
    const RowView view = {static_cast<char*>(t.data), t.dtype, 0, t.stride[0], 1};
    std::vector<double> sums(forward_.num_heads);
    for (size_t i = 0; i < work_.tasks.size(); ++i) {
      for (int64_t h = 0; h < forward_.group_size; ++h) {
        sums[work_.tasks[i].kv_head * forward_.group_size + h] +=
            grad_sinks_[i * forward_.group_size + h];
      }
    }
    for (int64_t head = 0; head < forward_.num_heads; ++head) {
      const float sum = static_cast<float>(sums[head]);
      WriteRow(view, 0, head, 1, &sum, 1.0f);
    }
  }

  const AttentionBackwardProblem& problem_;
  const AttentionProblem& forward_;
  const flashxla_context* context_;
  const AttentionBackwardEngine& engine_;
  const BackwardTasks work_;
  const int64_t num_workers_, key_stride_, value_stride_;
  int64_t scratch_bytes_ = 0, worker_bytes_ = 0;
  AlignedMemory memory_ = AllocateAligned(0);
  std::vector<float*> part_sums_;   // by task
  std::vector<double> grad_sinks_;  // [task][head of the group]
};

flashxla_status Differentiate(const flashxla_attention_backward_args& args,
                              const flashxla_context* context) {
  AttentionBackwardProblem problem;
  if (const flashxla_status status = ResolveAttentionBackward(args, &problem);
      status != FLASHXLA_OK) {
    return status;
  }
  const AttentionBackwardEngine& engine = GetAttentionEngines().backward;
  if (IsAnswered(context, engine.name, engine.description)) return FLASHXLA_OK;
  const bool check = context != nullptr && context->check_indices != 0;
  if (const flashxla_status status = ResolveSequences(check, &problem.forward);
      status != FLASHXLA_OK) {
    return status;
  }
  Backward(problem, context).Run();
  return FLASHXLA_OK;
}

}  // namespace
}  // namespace flashxla

flashxla_status flashxla_cpu_attention_backward(const flashxla_attention_backward_args* args,
                                                const flashxla_context* context) {
  return flashxla::GuardedOnCpu("attention_backward",
                                [&] { return flashxla::Differentiate(*args, context); });
}
