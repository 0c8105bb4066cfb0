// Which of this library's code the driver runs on a GPU. A library holds code for some GPUs and PTX
// that others translate: what a GPU could do says nothing about what the loaded code does.
#ifndef FLASHXLA_CSRC_CUDA_IMAGE_H_
#define FLASHXLA_CSRC_CUDA_IMAGE_H_

namespace flashxla {

struct Image {
  bool hopper;        // compiled for sm_90a: wgmma, TMA
  bool early_launch;  // compiled for sm_90 or newer: programmatic dependent launch
};

// Of the current device. Where there is none, what a Hopper GPU would load: programs can be
// compiled without a GPU.
Image LoadedImage();

// Why `hopper` is false.
const char* WhyNoHopper();

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_CUDA_IMAGE_H_
