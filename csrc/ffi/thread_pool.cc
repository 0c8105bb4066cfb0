#include "ffi/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "xla/ffi/api/ffi.h"

namespace flashxla {
namespace {

// One loop. It is shared because the pool may start a helper after the loop has ended: the helper
// then finds no index left, and touches nothing but this struct.
struct Loop {
  int64_t n;
  void (*body)(void*, int64_t);
  void* arg;
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::condition_variable all_done;
  int64_t done = 0;

  void Work() {
    int64_t mine = 0;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n; ++mine) body(arg, i);
    if (mine == 0) return;
    std::lock_guard<std::mutex> lock(mutex);
    done += mine;
    if (done == n) all_done.notify_all();
  }
};

}  // namespace

void ParallelForOnFfiPool(void* pool, int64_t n, void (*body)(void* arg, int64_t i), void* arg) {
  auto* threads = static_cast<xla::ffi::ThreadPool*>(pool);
  auto loop = std::make_shared<Loop>();
  loop->n = n, loop->body = body, loop->arg = arg;
  const int64_t helpers = std::min(threads->num_threads(), n) - 1;
  for (int64_t i = 0; i < helpers; ++i) {
    threads->Schedule([loop] { loop->Work(); });
  }
  loop->Work();
  // Waits only for indices that a running helper has taken, never for one that is still queued.
  std::unique_lock<std::mutex> lock(loop->mutex);
  loop->all_done.wait(lock, [&] { return loop->done == n; });
}

}  // namespace flashxla
