// The custom call targets: one that runs each operation and, if it has a plan, one that makes it.
#include "ffi/targets.h"

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "common/operations.h"
#include "ffi/binding.h"
#include "ffi/platform.h"

namespace flashxla {
namespace {

// Room for any operation's arguments.
#define FLASHXLA_ARGS(op, fields) flashxla_##op##_args op;
union AnyArgs {
  FLASHXLA_OPERATIONS(FLASHXLA_ARGS)
};

template <int kOperation, bool kPlan>
ffi::Error Handle(PlatformArgument platform, ffi::RemainingArgs operands,
                  ffi::RemainingRets results, ffi::Dictionary attributes) {
  const Operation& operation = kOperations[kOperation];
  AnyArgs args;
  std::memset(&args, 0, sizeof(args));
  if (auto error =
          Decode(operation, kPlan, operands, results, attributes, reinterpret_cast<char*>(&args));
      error.failure()) {
    return error;
  }
  flashxla_context context = MakeContext(platform);
  context.check_indices = flashxla_check_indices();
  context.prepare = kPlan;
  return ToError(operation.run(&args, &context), attributes);
}

template <int kOperation, bool kPlan>
XLA_FFI_Error* Handler(XLA_FFI_CallFrame* call_frame) {
  // Not XLA's macro: the traits depend on an environment variable, and it takes constants only.
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<PlatformContext>()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attrs()
                             .To(Handle<kOperation, kPlan>, PlatformTraits())
                             .release();
  return handler->Call(call_frame);
}

struct Target {
  std::string name;
  XLA_FFI_Handler* handler;
};

template <int... kOperation>
std::vector<Target> MakeTargets(std::integer_sequence<int, kOperation...>) {
  constexpr XLA_FFI_Handler* kRun[] = {Handler<kOperation, false>...};
  constexpr XLA_FFI_Handler* kMakePlan[] = {Handler<kOperation, true>...};
  std::vector<Target> targets;
  for (int i = 0; i < kNumOperations; ++i) {
    const std::string name = std::string("flashxla_") + kOperations[i].name;
    targets.push_back({name, kRun[i]});
    if (kOperations[i].Find(FieldKind::PLAN)) targets.push_back({name + "_plan", kMakePlan[i]});
  }
  return targets;
}

const std::vector<Target>& Targets() {
  static const std::vector<Target> targets =
      MakeTargets(std::make_integer_sequence<int, kNumOperations>());
  return targets;
}

const Target* TargetAt(int64_t i) {
  return i >= 0 && i < static_cast<int64_t>(Targets().size()) ? &Targets()[i] : nullptr;
}

}  // namespace
}  // namespace flashxla

const char* flashxla_ffi_target_name(int64_t i) {
  const auto* target = flashxla::TargetAt(i);
  return target ? target->name.c_str() : nullptr;
}

void* flashxla_ffi_target_handler(int64_t i) {
  const auto* target = flashxla::TargetAt(i);
  return target ? reinterpret_cast<void*>(target->handler) : nullptr;
}

const char* flashxla_ffi_register(const void* api, const char* platform) {
  static thread_local std::string message;
  const auto* runtime = static_cast<const XLA_FFI_Api*>(api);
  for (const auto& target : flashxla::Targets()) {
    XLA_FFI_Error* error =
        xla::ffi::Ffi::RegisterStaticHandler(runtime, target.name, platform, target.handler);
    if (error == nullptr) continue;
    message = target.name + ": " + xla::ffi::internal::GetErrorMessage(runtime, error);
    xla::ffi::internal::DestroyError(runtime, error);
    return message.c_str();
  }
  return nullptr;
}

int64_t flashxla_ffi_api_version() { return XLA_FFI_API_MAJOR * 1000 + XLA_FFI_API_MINOR; }

int64_t flashxla_ffi_runtime_api_version(const void* api) {
  const auto& version = static_cast<const XLA_FFI_Api*>(api)->api_version;
  return version.major_version * 1000 + version.minor_version;
}
