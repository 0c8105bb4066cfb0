// Denormal numbers as zeros, while attention is computed: weights and rescaled sums that are nearly
// 0 would take a hundred times as long. XLA's threads do so for all that they run.
#ifndef FLASHXLA_CSRC_CPU_DENORMALS_H_
#define FLASHXLA_CSRC_CPU_DENORMALS_H_

#include <cstdint>

#if defined(FLASHXLA_X86)
#include <xmmintrin.h>
#endif

namespace flashxla {

// Of the thread that makes it, until it is gone.
class DenormalsAreZero {
 public:
  DenormalsAreZero() : before_(Get()) { Set(before_ | kZero); }
  ~DenormalsAreZero() { Set(before_); }
  DenormalsAreZero(const DenormalsAreZero&) = delete;
  DenormalsAreZero& operator=(const DenormalsAreZero&) = delete;

 private:
#if defined(FLASHXLA_X86)
  using Mode = unsigned;
  static constexpr Mode kZero = 0x8040;  // MXCSR: results (FTZ), and what is read (DAZ)
  static Mode Get() { return _mm_getcsr(); }
  static void Set(Mode mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
  using Mode = uint64_t;
  static constexpr Mode kZero = Mode{1} << 24;  // FPCR.FZ: both
  static Mode Get() {
    Mode mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void Set(Mode mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
#else
  using Mode = int;
  static constexpr Mode kZero = 0;
  static Mode Get() { return 0; }
  static void Set(Mode) {}
#endif

  const Mode before_;
};

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CPU_DENORMALS_H_
