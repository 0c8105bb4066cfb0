// Numbers that tell calls apart.
#ifndef FLASHXLA_CSRC_CUDA_CALL_TAG_H_
#define FLASHXLA_CSRC_CUDA_CALL_TAG_H_

#include <cstdint>

namespace flashxla {

// A number that no other call has, and is not 0: see attention/flag.cuh.
uint64_t NewCallTag();

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CUDA_CALL_TAG_H_
