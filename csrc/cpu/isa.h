// The instruction sets that the vectorized sources are compiled for, one copy for each.
#ifndef FLASHXLA_CSRC_CPU_ISA_H_
#define FLASHXLA_CSRC_CPU_ISA_H_

#include "flashxla/common.h"

namespace flashxla {

// Each includes those before it.
enum class Isa {
  kBaseline,    // what the compiler assumes by default
  kAvx2,        // x86-64 with AVX2, FMA and F16C
  kAvx512,      // and AVX-512 F, BW, DQ and VL
  kAvx512Bf16,  // and AVX-512 BF16
};

// What the kernels use: the fastest one that this machine supports, or the one that the environment
// variable FLASHXLA_CPU_ISA names. The variable is read once per process.
Isa GetIsa();

// An error if FLASHXLA_CPU_ISA names an instruction set that is unknown or not supported here.
flashxla_status CheckIsa();

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CPU_ISA_H_
