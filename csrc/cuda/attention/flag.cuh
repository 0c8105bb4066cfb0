// Flags in the workspace, by which thread blocks of a call say that a partial result is there.
//
// Nobody clears them before the call: a flag is set if it holds the call's tag, a random number of
// 64 bits. It is cleared when it was seen, so that the same call may run again, as in a CUDA graph.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_FLAG_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_FLAG_CUH_

#include <cstdint>

namespace flashxla::attention {

// Also for what those threads wrote with which this one has synchronized.
__device__ inline void SetFlag(uint64_t* flag, uint64_t tag) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(tag) : "memory");
}

__device__ inline void AwaitFlag(uint64_t* flag, uint64_t tag) {
  uint64_t now;
  do {
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(flag) : "memory");
  } while (now != tag);
  *flag = 0;
}

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_FLAG_CUH_
