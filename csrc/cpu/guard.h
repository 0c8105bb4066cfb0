// What every CPU operation of the C ABI starts with.
#ifndef FLASHXLA_CSRC_CPU_GUARD_H_
#define FLASHXLA_CSRC_CPU_GUARD_H_

#include "common/error.h"
#include "cpu/isa.h"

namespace flashxla {

// Guarded, on an instruction set that the machine has.
template <typename Body>
flashxla_status GuardedOnCpu(const char* op, Body&& body) noexcept {
  if (const flashxla_status status = CheckIsa(); status != FLASHXLA_OK) return status;
  return Guarded(op, body);
}

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CPU_GUARD_H_
