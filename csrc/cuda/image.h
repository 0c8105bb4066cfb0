// Which of this library's code the driver has loaded. The library has code for some GPUs, and PTX
// that the driver compiles for others, so the GPU's architecture alone does not tell what the
// loaded code can do.
#ifndef FLASHXLA_CSRC_CUDA_IMAGE_H_
#define FLASHXLA_CSRC_CUDA_IMAGE_H_

namespace flashxla {

struct Image {
  bool hopper;        // compiled for sm_90a: wgmma, TMA
  bool early_launch;  // compiled for sm_90 or newer: programmatic dependent launch (PDL)
};

// For the current device. Without a GPU, assumes Hopper: programs can be compiled without one.
Image LoadedImage();

// Why `hopper` is false.
const char* WhyNoHopper();

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CUDA_IMAGE_H_
