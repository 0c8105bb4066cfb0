// Hopper's building blocks: warpgroup matrix instructions (wgmma), bulk tensor copies (TMA), and
// the barriers between them. They are defined for sm_90a only, where FLASHXLA_HOPPER is.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_HOPPER_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_HOPPER_CUH_

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define FLASHXLA_HOPPER 1
#endif

namespace flashxla::attention {

constexpr int kWarpgroupThreads = 128;

// Attribute of a kernel: so many neighbouring thread blocks, by x, are a cluster.
#if defined(FLASHXLA_HOPPER)
#define FLASHXLA_CLUSTER(size) __cluster_dims__(size, 1, 1)
#else
#define FLASHXLA_CLUSTER(size)
#endif

#if defined(FLASHXLA_HOPPER)

// Barriers in shared memory (mbarrier).

__device__ inline void InitBarrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ inline void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Says that this thread is done with what a barrier stands for. Each lane says so itself: one that
// spoke for its warp after __syncwarp would do, but where ptxas knows that the lanes are together
// it leaves that out, and compute-sanitizer's racecheck misses it. It takes no longer.
__device__ inline void Release(uint32_t barrier) { Arrive(barrier); }
// Says that bytes are to come, without an arrival, which has to follow.
__device__ inline void Expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ inline void ArriveExpecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Arrives once this thread's copies (CopyAsync16) are there.
__device__ inline void ArriveAfterCopies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void WaitBarrier(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra ready;\n"
      "bra again;\n"
      "ready:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// A position in a ring of stages, and the parity of the barriers in this round.
template <int kStages>
struct PipelineState {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void Next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// Makes ordinary stores to shared memory visible to TMA and the matrix instructions.
__device__ inline void FenceProxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Release, of what this thread stored for TMA or the matrix instructions.
__device__ inline void ReleaseStores(uint32_t barrier) {
  FenceProxy();
  Release(barrier);
}
// Barrier `id` of `threads` threads, some of which only arrive.
__device__ inline void SyncNamed(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void ArriveNamed(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Starts to bring the 128 bytes around an address into L2. It is no access: another kernel may
// still write there.
__device__ inline void PrefetchL2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// TMA.

__device__ inline void PrefetchMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ inline void LoadBox3(uint32_t to, const CUtensorMap* map, uint32_t barrier, int x, int y,
                                int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4, %5}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ inline void LoadBox4(uint32_t to, const CUtensorMap* map, uint32_t barrier, int x, int y,
                                int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4, %5, %6}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// Clusters: thread blocks that run at the same time and reach each other's shared memory.

// The place of this thread block in its cluster.
__device__ inline int ClusterRank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Waits for all threads of the cluster. What they did before is seen after it.
__device__ inline void SyncCluster() {
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}
// As Release, at the same barrier of another thread block of the cluster.
__device__ inline void ReleaseOf(uint32_t barrier, int rank) {
  asm volatile(
      "{.reg .b32 other; mapa.shared::cluster.u32 other, %0, %1; "
      "mbarrier.arrive.shared::cluster.b64 _, [other];}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
// Loads a box to the same place of all thread blocks of `ranks`, a bit each, and tells the barriers
// of each.
__device__ inline void LoadBox4Of(uint16_t ranks, uint32_t to, const CUtensorMap* map,
                                  uint32_t barrier, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "h"(ranks)
      : "memory");
}

// Moves registers between warpgroups: sets how many each thread of this one has.
template <int kCount>
__device__ inline void RaiseRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ inline void LowerRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Warpgroup matrix instructions (wgmma). Operands in shared memory have rows of 128 bytes with
// TMA's 128-byte swizzle, in groups of 8 rows (1024 bytes).

__device__ inline void FenceMatrix() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void CommitMatrix() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ inline void WaitMatrix() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// To be called when matrix instructions have finished with these registers. The compiler assumes
// that an instruction finishes at once; this keeps it from using them before this point.
template <int kCount>
__device__ inline void Pin(float (&c)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

// stride: bytes between neighbouring blocks of 64 columns. Only values have several blocks, since
// their rows, not their columns, are summed over.
__device__ inline uint64_t MatrixDescriptor(uint32_t address, uint32_t stride) {
  return uint64_t{(address & 0x3ffff) >> 4} | uint64_t{stride >> 4} << 16 |
         uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

// The descriptor (MatrixDescriptor) of an operand `bytes` after the one of `descriptor`. The
// address is in its low half, and does not overflow.
__device__ inline uint64_t After(uint64_t descriptor, int bytes) {
  const auto low = static_cast<uint32_t>(descriptor) + static_cast<uint32_t>(bytes >> 4);
  return descriptor >> 32 << 32 | low;
}

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_HOPPER_CUH_
