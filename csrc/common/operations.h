// The operations of this library as a table, from which handlers and host programs learn about
// them.
#ifndef FLASHXLA_CSRC_COMMON_OPERATIONS_H_
#define FLASHXLA_CSRC_COMMON_OPERATIONS_H_

#include <cstdint>

#include "flashxla/operations.h"

namespace flashxla {

enum class FieldKind { INPUT, RESULT, PLAN, WORKSPACE, INTEGER, LAYOUT, DTYPE, REAL };
enum class PlanUse { READ, STATIC, NONE };

struct Field {
  const char* name;
  FieldKind kind;
  PlanUse plan;
  int64_t offset;

  bool is_tensor() const { return kind <= FieldKind::WORKSPACE; }
};

struct Operation {
  const char* name;
  int64_t args_size;
  const Field* fields;
  int64_t num_fields;
  flashxla_status (*run)(const void* args, const flashxla_context* context);

  // The first field of that kind; null if there is none.
  const Field* Find(FieldKind kind) const;
};

#define FLASHXLA_COUNT(op, fields) +1
constexpr int kNumOperations = 0 FLASHXLA_OPERATIONS(FLASHXLA_COUNT);
#undef FLASHXLA_COUNT

extern const char* const kPlatform;  // "cpu" or "cuda"
extern const Operation kOperations[kNumOperations];

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_COMMON_OPERATIONS_H_
