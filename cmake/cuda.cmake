# libflashxla_cuda.so: the kernels' files by nvcc, the rest, and the link, by the C++ compiler. Nothing of CUDA but its
# driver is needed where it runs: the runtime is linked in.
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(FATAL_ERROR
    "FLASHXLA_CUDA needs nvcc 12.4 or newer, which is not on the PATH. Install the CUDA toolkit, or name the "
    "compiler with CUDACXX=/path/to/nvcc. Without FLASHXLA_CUDA the CPU library is complete.")
endif()

# 90a -> code for it alone; 100-virtual -> PTX, which cards from 10.0 on compile when it is loaded. If the list names
# no PTX, that of the oldest is added.
set(CMAKE_CUDA_ARCHITECTURES ${FLASHXLA_CUDA_ARCHITECTURES})
list(TRANSFORM CMAKE_CUDA_ARCHITECTURES APPEND "-real" REGEX "^[0-9]+[a-z]?$")
if(NOT CMAKE_CUDA_ARCHITECTURES MATCHES "-virtual")
  set(FLASHXLA_PTX ${FLASHXLA_CUDA_ARCHITECTURES})
  list(FILTER FLASHXLA_PTX INCLUDE REGEX "^[0-9]+$")
  if(FLASHXLA_PTX)
    list(SORT FLASHXLA_PTX COMPARE NATURAL)
    list(GET FLASHXLA_PTX 0 FLASHXLA_PTX)
    list(APPEND CMAKE_CUDA_ARCHITECTURES "${FLASHXLA_PTX}-virtual")
  endif()
endif()

set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -DNDEBUG")
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
message(STATUS "CUDA: ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION} for ${CMAKE_CUDA_ARCHITECTURES}")

file(GLOB_RECURSE FLASHXLA_KERNELS CONFIGURE_DEPENDS csrc/cuda/*.cu)
file(GLOB FLASHXLA_CUDA_SOURCES CONFIGURE_DEPENDS csrc/common/*.cc csrc/cuda/*.cc csrc/ffi/*.cc)
list(FILTER FLASHXLA_CUDA_SOURCES EXCLUDE REGEX "/thread_pool\\.cc$")

# By themselves, so that the place of XLA's headers, which changes between builds, recompiles no kernel. nvcc compiles
# their host code with GCC, also where the C++ compiler is one with another C++ library (make wheel-cuda): so they use
# of that library only what headers alone define. Code that needs more (containers, strings) is a .cc file; the link
# fails if it is not.
add_library(flashxla_kernels OBJECT ${FLASHXLA_KERNELS})
target_include_directories(flashxla_kernels PRIVATE csrc csrc/include)
target_compile_options(flashxla_kernels PRIVATE --expt-relaxed-constexpr)
if("90a" IN_LIST FLASHXLA_CUDA_ARCHITECTURES)
  # What a program that is compiled without a GPU is compiled for.
  target_compile_definitions(flashxla_kernels PRIVATE FLASHXLA_HAS_HOPPER_CODE)
endif()

add_library(flashxla_cuda SHARED $<TARGET_OBJECTS:flashxla_kernels> ${FLASHXLA_CUDA_SOURCES})
flashxla_library(flashxla_cuda)
target_include_directories(flashxla_cuda SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
target_compile_options(flashxla_cuda PRIVATE -Wall -Wextra)
target_compile_definitions(flashxla_cuda PRIVATE FLASHXLA_PLATFORM_CUDA)
# By its path: CUDA::cudart_static would bring libraries of this machine, also where the C++ compiler targets another.
target_link_libraries(flashxla_cuda PRIVATE "${CUDAToolkit_LIBRARY_DIR}/libcudart_static.a" Threads::Threads
                                            ${CMAKE_DL_LIBS} rt)
# A symbol that nothing defines is an error of the build, not of the first call.
target_link_options(flashxla_cuda PRIVATE LINKER:-z,defs)
set_target_properties(flashxla_cuda PROPERTIES LINKER_LANGUAGE CXX)
install(TARGETS flashxla_cuda LIBRARY DESTINATION ${FLASHXLA_CUDA_DESTINATION} COMPONENT cuda)
