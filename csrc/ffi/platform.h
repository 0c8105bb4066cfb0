// The platform that the handlers are compiled for: how an FFI call's execution context becomes a
// flashxla_context, and which library function serves it.
#ifndef FLASHXLA_CSRC_FFI_PLATFORM_H_
#define FLASHXLA_CSRC_FFI_PLATFORM_H_

#include "ffi/binding.h"
#include "ffi/thread_pool.h"

// The library function of this platform: FLASHXLA_FUNCTION(attention) is flashxla_cpu_attention.
#define FLASHXLA_FUNCTION(op) flashxla_cpu_##op

namespace flashxla {

using PlatformContext = ffi::ThreadPool;

inline auto BindOperation() {
  return ffi::Ffi::Bind().Ctx<PlatformContext>().RemainingArgs().RemainingRets().Attrs();
}

// Runs an operation on XLA's thread pool.
template <typename Op, typename Function>
ffi::Error Execute(Function function, ffi::ThreadPool& pool, ffi::RemainingArgs operands,
                   ffi::RemainingRets results, ffi::Dictionary attrs) {
  typename Op::Args args = {};
  if (auto error = Decode<Op>(operands, results, attrs, &args); error.failure()) return error;
  flashxla_context context = {};
  context.parallel_for = ParallelForOnFfiPool;
  context.pool = &pool;
  context.num_threads = pool.num_threads() > 0 ? pool.num_threads() : 1;
  context.check_indices = flashxla_check_indices();
  return ToError<Op>(function(&args, &context), attrs);
}

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_FFI_PLATFORM_H_
