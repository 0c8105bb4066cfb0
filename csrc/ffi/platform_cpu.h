// XLA:CPU: operations run on the thread pool of the runtime.
#ifndef FLASHXLA_CSRC_FFI_PLATFORM_CPU_H_
#define FLASHXLA_CSRC_FFI_PLATFORM_CPU_H_

#include <initializer_list>

#include "ffi/binding.h"
#include "ffi/thread_pool.h"

// The library function of this platform: FLASHXLA_FUNCTION(attention) is flashxla_cpu_attention.
#define FLASHXLA_FUNCTION(op) flashxla_cpu_##op

namespace flashxla {

using PlatformContext = ffi::ThreadPool;

inline std::initializer_list<ffi::Traits> PlatformTraits() { return {}; }

inline flashxla_context MakeContext(ffi::ThreadPool& pool) {
  flashxla_context context = {};
  context.parallel_for = ParallelForOnFfiPool;
  context.pool = &pool;
  context.num_threads = pool.num_threads() > 0 ? pool.num_threads() : 1;
  return context;
}

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_FFI_PLATFORM_CPU_H_
