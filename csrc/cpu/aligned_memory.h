// Memory that vectors are loaded from.
#ifndef FLASHXLA_CSRC_CPU_ALIGNED_MEMORY_H_
#define FLASHXLA_CSRC_CPU_ALIGNED_MEMORY_H_

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "common/round_up.h"

namespace flashxla {

constexpr int64_t kAlignment = 64;  // of the bytes, which is also what parts are rounded up to

using AlignedMemory = std::unique_ptr<char, decltype(&std::free)>;

// bytes: a multiple of kAlignment. Throws std::bad_alloc.
inline AlignedMemory AllocateAligned(int64_t bytes) {
  AlignedMemory memory(
      bytes == 0 ? nullptr : static_cast<char*>(std::aligned_alloc(kAlignment, bytes)), std::free);
  if (memory == nullptr && bytes > 0) throw std::bad_alloc();
  return memory;
}

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CPU_ALIGNED_MEMORY_H_
