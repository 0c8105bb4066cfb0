#ifndef FLASHXLA_CSRC_FFI_PLATFORM_CPU_H_
#define FLASHXLA_CSRC_FFI_PLATFORM_CPU_H_

#include "ffi/binding.h"
#include "ffi/thread_pool.h"

// The library function of this platform: FLASHXLA_FUNCTION(attention) is flashxla_cpu_attention.
#define FLASHXLA_FUNCTION(op) flashxla_cpu_##op

namespace flashxla {

using PlatformContext = ffi::ThreadPool;

inline auto BindPlatform() { return ffi::Ffi::Bind().Ctx<PlatformContext>(); }

template <typename Function, typename Args>
ffi::Error Run(Function function, const Args& args, ffi::ThreadPool& pool) {
  flashxla_context context = {};
  context.parallel_for = ParallelForOnFfiPool;
  context.pool = &pool;
  context.num_threads = pool.num_threads() > 0 ? pool.num_threads() : 1;
  context.check_indices = flashxla_check_indices();
  return ToError(function(&args, &context));
}

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_FFI_PLATFORM_CPU_H_
