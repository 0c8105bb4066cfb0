// The instruction sets that some sources are compiled for more than once.
#ifndef FLASHXLA_CSRC_CPU_ISA_H_
#define FLASHXLA_CSRC_CPU_ISA_H_

namespace flashxla {

enum class Isa {
  kBaseline,  // whatever the compiler assumes
  kAvx2,      // x86-64 with AVX2, FMA and F16C
  kAvx512,    // and AVX-512 F, BW, DQ and VL
};

// The best one that this machine runs.
Isa GetIsa();

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CPU_ISA_H_
