#include "cpu/parallel.h"

#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#define FLASHXLA_HAS_FORK 1
#endif

namespace flashxla {
namespace {

class ThreadPool {
 public:
  // Returns false, having run nothing, if another call is using the pool.
  bool Run(int64_t num_threads, int64_t n, void (*body)(void*, int64_t), void* arg) {
    std::unique_lock<std::mutex> running(run_mutex_, std::try_to_lock);
    if (!running.owns_lock()) return false;
    const int64_t helpers = std::min(num_threads, n) - 1;
    StartWorkers(helpers);
    next_.store(0, std::memory_order_relaxed);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      n_ = n, body_ = body, arg_ = arg;
      open_slots_ = helpers;
    }
    for (int64_t i = 0; i < helpers; ++i) work_.notify_one();
    RunItems(n, body, arg);
    // No need to wait for workers that have not woken up yet: they will find no open slot.
    std::unique_lock<std::mutex> lock(mutex_);
    open_slots_ = 0;
    done_.wait(lock, [this] { return active_ == 0; });
    return true;
  }

 private:
  void StartWorkers(int64_t count) {
    try {
      for (; num_workers_ < count; ++num_workers_) std::thread([this] { WorkerLoop(); }).detach();
    } catch (const std::system_error&) {
      // No more threads can be started: those that exist do the work.
    }
  }

  void WorkerLoop() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      work_.wait(lock, [this] { return open_slots_ > 0; });
      --open_slots_;
      ++active_;
      const auto n = n_;
      const auto body = body_;
      const auto arg = arg_;
      lock.unlock();
      RunItems(n, body, arg);
      lock.lock();
      if (--active_ == 0) done_.notify_one();
    }
  }

  void RunItems(int64_t n, void (*body)(void*, int64_t), void* arg) {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < n;) body(arg, i);
  }

  std::mutex run_mutex_;  // held by the call that uses the pool
  int64_t num_workers_ = 0;
  std::atomic<int64_t> next_{0};

  std::mutex mutex_;  // guards what follows
  std::condition_variable work_, done_;
  int64_t n_ = 0;
  void (*body_)(void*, int64_t) = nullptr;
  void* arg_ = nullptr;
  int64_t open_slots_ = 0;  // workers that may still join the current call
  int64_t active_ = 0;      // workers that are in the current call
};

// Never deleted: workers sleep on it until the process ends. A forked child has no workers, and the
// mutexes may be locked, so it makes a new pool and does not touch its copy of the old one.
std::atomic<ThreadPool*> the_pool{nullptr};

ThreadPool* GetPool() {
#if FLASHXLA_HAS_FORK
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { the_pool.store(nullptr, std::memory_order_release); });
  static_cast<void>(registered);
#endif
  ThreadPool* pool = the_pool.load(std::memory_order_acquire);
  if (pool == nullptr) {
    ThreadPool* fresh = new ThreadPool;
    if (the_pool.compare_exchange_strong(pool, fresh, std::memory_order_acq_rel)) return fresh;
    delete fresh;  // another thread was first, and `fresh` has started no workers
  }
  return pool;
}

}  // namespace

void RunOnPool(int64_t num_threads, int64_t n, void (*body)(void*, int64_t), void* arg) {
  if (GetPool()->Run(num_threads, n, body, arg)) return;
  for (int64_t i = 0; i < n; ++i) body(arg, i);
}

}  // namespace flashxla
