// parallel_for on the thread pool that XLA:CPU hands to a custom call.
#ifndef FLASHXLA_CSRC_FFI_THREAD_POOL_H_
#define FLASHXLA_CSRC_FFI_THREAD_POOL_H_

#include <cstdint>

namespace flashxla {

// A flashxla_parallel_for; pool is an xla::ffi::ThreadPool*.
void ParallelForOnFfiPool(void* pool, int64_t n, void (*body)(void* arg, int64_t i), void* arg);

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_FFI_THREAD_POOL_H_
