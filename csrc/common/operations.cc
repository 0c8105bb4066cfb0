#include "common/operations.h"

#include <cstddef>
#include <iterator>

// Each platform's library compiles this file with its own functions.
#ifdef FLASHXLA_PLATFORM_CUDA
#define FLASHXLA_PLATFORM "cuda"
#define FLASHXLA_FUNCTION(op) flashxla_cuda_##op
#else
#define FLASHXLA_PLATFORM "cpu"
#define FLASHXLA_FUNCTION(op) flashxla_cpu_##op
#endif

namespace flashxla {
namespace {

#define FLASHXLA_FIELD(kind, name, plan) \
  {#name, FieldKind::kind, PlanUse::plan, static_cast<int64_t>(offsetof(Args, name))},
#define FLASHXLA_TABLE(op, fields)                                                  \
  struct op {                                                                       \
    using Args = flashxla_##op##_args;                                              \
    static constexpr Field kFields[] = {fields(FLASHXLA_FIELD)};                    \
    static flashxla_status Run(const void* args, const flashxla_context* context) { \
      return FLASHXLA_FUNCTION(op)(static_cast<const Args*>(args), context);        \
    }                                                                               \
  };
FLASHXLA_OPERATIONS(FLASHXLA_TABLE)

}  // namespace

#define FLASHXLA_ROW(op, fields) \
  {#op, sizeof(op::Args), op::kFields, static_cast<int64_t>(std::size(op::kFields)), op::Run},
const char* const kPlatform = FLASHXLA_PLATFORM;
const Operation kOperations[kNumOperations] = {FLASHXLA_OPERATIONS(FLASHXLA_ROW)};

const Field* Operation::Find(FieldKind kind) const {
  for (int64_t i = 0; i < num_fields; ++i) {
    if (fields[i].kind == kind) return &fields[i];
  }
  return nullptr;
}

}  // namespace flashxla
