// The frame of every CPU operation of the C ABI.
#ifndef FLASHXLA_CSRC_CPU_GUARD_H_
#define FLASHXLA_CSRC_CPU_GUARD_H_

#include "common/error.h"
#include "cpu/isa.h"

namespace flashxla {

// Guarded, after checking FLASHXLA_CPU_ISA.
template <typename Body>
flashxla_status GuardedOnCpu(const char* op, Body&& body) noexcept {
  if (const flashxla_status status = CheckIsa(); status != FLASHXLA_OK) return status;
  return Guarded(op, body);
}

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CPU_GUARD_H_
