// Parallel loops on the caller's threads (context->parallel_for) or on the library's own.
#ifndef FLASHXLA_CSRC_CPU_PARALLEL_H_
#define FLASHXLA_CSRC_CPU_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>

#include "flashxla/common.h"

namespace flashxla {

inline int64_t NumThreads(const flashxla_context* context) {
  return context == nullptr ? 1 : std::max<int64_t>(context->num_threads, 1);
}

// Runs body(arg, i) for i in [0, n) on at most `num_threads` threads, the caller's included. If
// another call is using the pool, the caller's thread runs everything.
void RunOnPool(int64_t num_threads, int64_t n, void (*body)(void* arg, int64_t i), void* arg);

// Runs body(i) for i in [0, n). Bodies must not wait for one another: they may run one by one.
template <typename Body>
void ParallelFor(const flashxla_context* context, int64_t n, Body&& body) {
  const int64_t num_threads = NumThreads(context);
  if (n <= 1 || num_threads == 1) {
    for (int64_t i = 0; i < n; ++i) body(i);
    return;
  }
  using Plain = std::remove_reference_t<Body>;
  auto call = [](void* arg, int64_t i) { (*static_cast<Plain*>(arg))(i); };
  void* arg = const_cast<void*>(static_cast<const void*>(&body));
  if (context->parallel_for != nullptr) {
    context->parallel_for(context->pool, n, call, arg);
  } else {
    RunOnPool(num_threads, n, call, arg);
  }
}

// Runs body(worker, task) for task in [0, num_tasks). A free worker takes the next task. A worker
// runs one task at a time, so it can own scratch memory.
template <typename Body>
void ParallelTasks(const flashxla_context* context, int64_t num_workers, int64_t num_tasks,
                   Body&& body) {
  std::atomic<int64_t> next{0};
  ParallelFor(context, std::min(num_workers, num_tasks), [&](int64_t worker) {
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) {
      body(worker, task);
    }
  });
}

// Runs body(begin, end) for parts of [begin, end) of at most `chunk`, on any threads.
template <typename Body>
void ParallelChunks(const flashxla_context* context, int64_t begin, int64_t end, int64_t chunk,
                    Body&& body) {
  const int64_t num_chunks = (end - begin + chunk - 1) / chunk;
  ParallelTasks(context, NumThreads(context), num_chunks, [&](int64_t, int64_t i) {
    const int64_t first = begin + i * chunk;
    body(first, std::min(first + chunk, end));
  });
}

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CPU_PARALLEL_H_
