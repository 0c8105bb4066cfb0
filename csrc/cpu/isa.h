// The instruction sets that some sources are compiled for more than once.
#ifndef FLASHXLA_CSRC_CPU_ISA_H_
#define FLASHXLA_CSRC_CPU_ISA_H_

#include "flashxla/common.h"

namespace flashxla {

// Each has what those before it have.
enum class Isa {
  kBaseline,  // whatever the compiler assumes
  kAvx2,      // x86-64 with AVX2, FMA and F16C
  kAvx512,    // and AVX-512 F, BW, DQ and VL
};

// What the kernels use: the best one that this machine runs, or what the environment variable
// FLASHXLA_CPU_ISA names. Read once a process.
Isa GetIsa();

// An error if FLASHXLA_CPU_ISA names what does not exist or does not run here.
flashxla_status CheckIsa();

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CPU_ISA_H_
