// Rows of keys or values that threads copy to shared memory, where TMA takes longer or cannot.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_COPIED_ROWS_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_COPIED_ROWS_CUH_

#include <type_traits>

#include "cuda/attention/mma.cuh"
#include "cuda/attention/problem.cuh"
#include "cuda/attention/warp.cuh"

namespace flashxla::attention {

// kCount rows, which one warp copies. Each lane knows where one of them lies, and copies a vector
// of 16 bytes of each.
//
// A stage has kTileRows rows, in blocks of columns: rows of 128 bytes, in which chunk c of row r is
// at place c ^ r % 8, as TMA's swizzle has it. kVectors: of a row, in all blocks. kElements: of a
// vector.
template <int kTileRows, int kCount, int kVectors, int kElements>
struct CopiedRows {
  static constexpr int kRowBytes = 128;
  static constexpr int kAtOnce = 32 / kVectors;  // rows that the lanes copy together
  static_assert(kCount % (2 * kAtOnce) == 0);

  // Starts to copy the rows to a stage, from its row `first_row` on, a multiple of kCount. place:
  // block and token of row `lane % kCount`; a block of -1 stands for zeros. kUnit: bytes that are
  // copied at a time, 4, 8 or 16, in which offsets fit 32 bits (kv_near).
  template <int kUnit>
  __device__ static void Copy(const Cache& cache, int kv_head, int2 place, int first_row,
                              uint32_t stage) {
    __ballot_sync(kAllLanes, place.x < 0) == 0
        ? Copy<kUnit, true>(cache, kv_head, place, first_row, stage)
        : Copy<kUnit, false>(cache, kv_head, place, first_row, stage);
  }

 private:
  // kAllExist: all rows do. Then little is done for each copy: the warps that copy are short of
  // time.
  template <int kUnit, bool kAllExist>
  __device__ static void Copy(const Cache& cache, int kv_head, int2 place, int first_row,
                              uint32_t stage) {
    const int lane = threadIdx.x & 31, vector = lane % kVectors, row = first_row + lane / kVectors;
    constexpr int kUnits = 16 / kUnit, kOfUnit = kElements / kUnits;
    auto unit = [](int64_t stride) { return static_cast<uint32_t>(stride / kOfUnit); };
    const uint32_t row_offset = place.x * unit(cache.stride_block) +
                                place.y * unit(cache.stride_token) +
                                kv_head * unit(cache.stride_head);
    uint64_t from = reinterpret_cast<uint64_t>(cache.data) + vector * 16;
    // Else ptxas adds it up anew for each copy, in three instructions instead of one.
    asm volatile("" : "+l"(from));
    const uint32_t to =
        stage + (vector / 8 * kTileRows + row) * kRowBytes + (vector % 8 ^ row % 8) * 16;
    const int columns = cache.head_size - vector * kElements;
    const bool idle = lane >= kAtOnce * kVectors;
    // Copies whose places are asked for together.
    constexpr int kTogether = !kAllExist ? 1 : kCount % (4 * kAtOnce) == 0 ? 4 : 2;
#pragma unroll(kAllExist ? kCount / kAtOnce / kTogether : 1)
    for (int first = 0; first < kCount; first += kTogether * kAtOnce) {
      uint64_t at[kTogether];
      bool exists[kTogether];
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        const int i = first + n * kAtOnce + lane / kVectors;
        at[n] = from + uint64_t{__shfl_sync(kAllLanes, row_offset, i)} * kUnit;
        exists[n] = kAllExist || __shfl_sync(kAllLanes, place.x, i) >= 0;
      }
      if (idle) continue;
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        const int i = first + n * kAtOnce;
        // Row i of these is at row % 8 ^ i % 8 of 8: warps begin at multiples of 4.
        const uint32_t row_to = (to ^ i % 8 * 16) + i * kRowBytes;
        const void* row_from = reinterpret_cast<const void*>(at[n]);
        auto copy = [&](auto unit) {
          constexpr int kNumber = decltype(unit)::value;
          if constexpr (kNumber < kUnits) {
            CopyAsync<kUnit, kNumber * kUnit>(row_to, row_from,
                                              exists[n] && columns > kNumber * kOfUnit);
          }
        };
        copy(std::integral_constant<int, 0>{}), copy(std::integral_constant<int, 1>{});
        copy(std::integral_constant<int, 2>{}), copy(std::integral_constant<int, 3>{});
      }
    }
  }
};

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_COPIED_ROWS_CUH_
