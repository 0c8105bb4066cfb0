// The platform that the handlers are compiled for: what an FFI call's execution context is, how it
// becomes a flashxla_context, and which library function serves it.
#ifndef FLASHXLA_CSRC_FFI_PLATFORM_H_
#define FLASHXLA_CSRC_FFI_PLATFORM_H_

#ifdef FLASHXLA_PLATFORM_CUDA
#include "ffi/platform_cuda.h"
#else
#include "ffi/platform_cpu.h"
#endif

namespace flashxla {

inline auto BindOperation() {
  return ffi::Ffi::Bind().Ctx<PlatformContext>().RemainingArgs().RemainingRets().Attrs();
}

// Runs an operation where its platform runs it. `platform` is what PlatformContext decodes to.
template <typename Op, typename Function, typename Platform>
ffi::Error Execute(Function function, Platform& platform, ffi::RemainingArgs operands,
                   ffi::RemainingRets results, ffi::Dictionary attrs) {
  typename Op::Args args = {};
  if (auto error = Decode<Op>(operands, results, attrs, &args); error.failure()) return error;
  flashxla_context context = MakeContext(platform);
  context.check_indices = flashxla_check_indices();
  return ToError<Op>(function(&args, &context), attrs);
}

using PlatformArgument = ffi::CtxDecoding<PlatformContext>::Type;

}  // namespace flashxla

// Defines the C symbol of a handler. XLA's own macro takes traits only as constants.
#define FLASHXLA_DEFINE_HANDLER(name)                                                         \
  extern "C" XLA_FFI_Error* name(XLA_FFI_CallFrame* call_frame) {                             \
    static auto* handler =                                                                    \
        flashxla::BindOperation().To(flashxla::Handle, flashxla::PlatformTraits()).release(); \
    return handler->Call(call_frame);                                                         \
  }

#endif  // FLASHXLA_CSRC_FFI_PLATFORM_H_
