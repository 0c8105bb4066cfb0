// Loops on the threads of an OpenMP runtime that the process has already. That runtime's threads
// keep their processors busy for some milliseconds after each of their loops, waiting for the next
// one: beside them threads of our own would have half of a processor each.
#include <unistd.h>

#include <atomic>

#include "cpu/parallel.h"

namespace flashxla {
namespace {

// GOMP_parallel(fn, data, num_threads, flags): each thread of a team runs fn(data). With 0 the
// runtime chooses the number of threads, as it does for its other loops: a team of another size
// would make it end threads and start them again.
using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

struct Loop {
  int64_t n;
  void (*body)(void*, int64_t);
  void* arg;
  std::atomic<int64_t> next{0};
};

void Work(void* data) {
  Loop& loop = *static_cast<Loop*>(data);
  for (int64_t i; (i = loop.next.fetch_add(1, std::memory_order_relaxed)) < loop.n;) {
    loop.body(loop.arg, i);
  }
}

const pid_t loaded_by = getpid();

}  // namespace
}  // namespace flashxla

void flashxla_openmp_parallel_for(void* pool, int64_t n, void (*body)(void* arg, int64_t i),
                                  void* arg) {
  using namespace flashxla;
  // A forked child has none of the runtime's threads, and GCC's would wait for them for ever.
  if (getpid() != loaded_by) return RunOnPool(n, n, body, arg);
  Loop loop{n, body, arg};
  reinterpret_cast<GompParallel>(pool)(Work, &loop, 0, 0);
}
