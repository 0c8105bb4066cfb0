// XLA:CPU: operations run on the runtime's thread pool.
#ifndef FLASHXLA_CSRC_FFI_PLATFORM_CPU_H_
#define FLASHXLA_CSRC_FFI_PLATFORM_CPU_H_

#include <initializer_list>

#include "ffi/binding.h"
#include "ffi/thread_pool.h"

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
