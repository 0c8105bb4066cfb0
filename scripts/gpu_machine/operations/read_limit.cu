// How fast a GPU reads keys and values at all: kernels that load the pages of a decode step by TMA,
// as the engine swap does, and compute nothing; and one that reads as many bytes in order. nvcc -O3
// -std=c++17 -arch=sm_90a -Icsrc read_limit.cu
//
// 64 sequences of 2,048 keys, 8 heads, 16 bits, pages of 16 unless said, in any order. A thread
// block has a head, or neighbouring ones, and a share of all steps of 64 keys.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#include "cuda/attention/hopper.cuh"
#include "cuda/attention/mma.cuh"

namespace {

using flashxla::attention::SharedAddress;

constexpr int kHeads = 8, kStepKeys = 64, kRowBytes = 128, kColumns = kRowBytes / 2;
constexpr int kLoader = 32, kReaders = 128;  // threads
constexpr int64_t kKeys = 64 * 2048;
constexpr int kMaxStages = 16, kBlocksEach = 2;
constexpr int kStageBytes = 64 * 1024, kMostSharedBytes = 96 * 1024;

void Check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(1);
}

struct Case {
  const char* name;
  int dims, page, heads_each;  // heads_each: of a thread block
  bool heads_first;            // a page has head after head, not token after token
  CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
};

struct Maps {
  CUtensorMap k, v;
};

// blocks: of 64 columns. box_keys: tokens of a box.
__global__ void __launch_bounds__(kReaders + kLoader, kBlocksEach)
    LoadPages(const __grid_constant__ Maps maps, const int* table, int steps, int share, int stages,
              int page, int box_keys, int blocks) {
#if defined(FLASHXLA_HOPPER)
  namespace attention = flashxla::attention;
  extern __shared__ __align__(1024) char memory[];
  __shared__ uint64_t full[kMaxStages], empty[kMaxStages];
  const int half = kStepKeys * kRowBytes * blocks;
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; ++i) {
      attention::InitBarrier(SharedAddress(&full[i]), 1);
      attention::InitBarrier(SharedAddress(&empty[i]), kReaders);
    }
  }
  __syncthreads();
  const int first = blockIdx.y * share, end = min(first + share, steps);
  int stage = 0;
  uint32_t parity = threadIdx.x < kReaders ? 0 : 1;
  const int lane = threadIdx.x - kReaders, boxes = kStepKeys / box_keys;
  auto block_of = [&](int step) {
    return lane >= 0 && lane < boxes && step < end
               ? table[(step * kStepKeys + lane * box_keys) / page]
               : 0;
  };
  int next = block_of(first);
  for (int step = first; step < end; ++step) {
    if (lane < 0) {
      attention::WaitBarrier(SharedAddress(&full[stage]), parity);
      attention::Release(SharedAddress(&empty[stage]));
    } else {
      const int now = next, token = (step * kStepKeys + lane * box_keys) % page;
      next = block_of(step + 1);
      const uint32_t barrier = SharedAddress(&full[stage]);
      const uint32_t to = SharedAddress(memory) + stage * 2 * half;
      attention::WaitBarrier(SharedAddress(&empty[stage]), parity);
      if (lane == 0) attention::ArriveExpecting(barrier, 2 * half);
      __syncwarp();
      for (int c = 0; c < blocks && lane < boxes; ++c) {
        const uint32_t place = to + c * kStepKeys * kRowBytes + lane * box_keys * kRowBytes;
        attention::LoadBox4(place, &maps.k, barrier, c * kColumns, blockIdx.x, token, now);
        attention::LoadBox4(place + half, &maps.v, barrier, c * kColumns, blockIdx.x, token, now);
      }
    }
    if (++stage == stages) stage = 0, parity ^= 1;
  }
#endif
}

// Reads `count` vectors of 16 bytes, all thread blocks side by side.
__global__ void __launch_bounds__(512)
    LoadInOrder(const uint4* data, int64_t count, uint4* unused) {
  constexpr int kAtOnce = 8;
  uint4 sum = {};
  const int64_t tile = int64_t{kAtOnce} * blockDim.x;
  for (int64_t first = blockIdx.x * tile; first < count; first += gridDim.x * tile) {
    uint4 x[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) x[i] = __ldcs(data + first + i * blockDim.x + threadIdx.x);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      sum.x ^= x[i].x, sum.y ^= x[i].y, sum.z ^= x[i].z, sum.w ^= x[i].w;
    }
  }
  if ((sum.x | sum.y | sum.z | sum.w) != 0) *unused = sum;  // never: all is 0
}

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);

CUtensorMap MapOf(Encode encode, const Case& c, char* data, int box_keys) {
  const auto row = static_cast<cuuint64_t>(c.dims) * 2, page = static_cast<cuuint64_t>(c.page);
  const cuuint64_t dims[] = {static_cast<cuuint64_t>(c.dims * c.heads_each),
                             static_cast<cuuint64_t>(kHeads / c.heads_each), page,
                             static_cast<cuuint64_t>(kKeys / c.page)};
  const cuuint64_t strides[] = {c.heads_first ? page * row : row * c.heads_each,
                                c.heads_first ? row : row * kHeads, page * row * kHeads};
  const cuuint32_t box[] = {kColumns, 1, static_cast<cuuint32_t>(box_keys), 1},
                   ones[] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, data, dims, strides, box, ones,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, c.promotion,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) std::exit(2);
  return map;
}

// The median of some graphs of 20 launches, in microseconds a launch.
double Time(cudaStream_t stream, const std::function<void()>& launch) {
  constexpr int kLaunches = 20, kRounds = 7;
  cudaGraph_t graph;
  cudaGraphExec_t program;
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < kLaunches; ++i) launch();
  Check(cudaStreamEndCapture(stream, &graph));
  Check(cudaGraphInstantiate(&program, graph, 0));
  cudaEvent_t begin, end;
  Check(cudaEventCreate(&begin));
  Check(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < kRounds; ++i) {
    Check(cudaEventRecord(begin, stream));
    Check(cudaGraphLaunch(program, stream));
    Check(cudaEventRecord(end, stream));
    Check(cudaEventSynchronize(end));
    float ms;
    Check(cudaEventElapsedTime(&ms, begin, end));
    times.push_back(ms * 1e3f / kLaunches);
  }
  std::sort(times.begin(), times.end());
  return times[kRounds / 2];
}

}  // namespace

int main() {
  void* encode;
  cudaDriverEntryPointQueryResult found;
  Check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000,
                                         cudaEnableDefault, &found));
  cudaDeviceProp properties;
  Check(cudaGetDeviceProperties(&properties, 0));
  std::printf("%s\n", properties.name);
  cudaStream_t stream;
  Check(cudaStreamCreate(&stream));
  Check(cudaFuncSetAttribute(LoadPages, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kMostSharedBytes));
  const Case cases[] = {{"head size 128", 128, 16, 1, false},
                        {"head size 128, HND", 128, 16, 1, true},
                        {"head size 128, pages of 256", 128, 256, 1, false},
                        {"head size 64", 64, 16, 1, false, CU_TENSOR_MAP_L2_PROMOTION_NONE},
                        {"head size 96", 96, 16, 1, false, CU_TENSOR_MAP_L2_PROMOTION_NONE},
                        {"head size 96, two heads a thread block", 96, 16, 2, false,
                         CU_TENSOR_MAP_L2_PROMOTION_L2_128B},
                        {"head size 96, HND", 96, 16, 1, true, CU_TENSOR_MAP_L2_PROMOTION_NONE}};
  auto print = [](const char* name, int64_t bytes, double us) {
    std::printf("%s: %.1f us, %.2f TB/s\n", name, us, bytes / us * 1e-6);
  };
  for (const Case& c : cases) {
    const int64_t bytes = kKeys * kHeads * c.dims * 2;
    char* data;
    Check(cudaMalloc(&data, 2 * bytes));
    Check(cudaMemset(data, 0, 2 * bytes));
    std::vector<int> order(kKeys / c.page);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(1));
    int* table;
    Check(cudaMalloc(&table, order.size() * sizeof(int)));
    Check(cudaMemcpy(table, order.data(), order.size() * sizeof(int), cudaMemcpyHostToDevice));
    const int box_keys = std::min(c.page, kStepKeys), heads = kHeads / c.heads_each;
    const auto map = [&](char* from) {
      return MapOf(reinterpret_cast<Encode>(encode), c, from, box_keys);
    };
    const Maps maps = {map(data), map(data + bytes)};
    const int blocks = (c.dims * c.heads_each + kColumns - 1) / kColumns;
    const int stage_bytes = 2 * kStepKeys * kRowBytes * blocks;
    const int stages = std::max(kStageBytes / stage_bytes, 2);
    const int parts = kBlocksEach * properties.multiProcessorCount / heads;
    const int steps = static_cast<int>(kKeys / kStepKeys), share = (steps + parts - 1) / parts;
    const double us = Time(stream, [&] {
      LoadPages<<<dim3(heads, parts), kReaders + kLoader, stages * stage_bytes, stream>>>(
          maps, table, steps, share, stages, c.page, box_keys, blocks);
    });
    print(c.name, 2 * bytes, us);
    if (&c == cases) {
      auto* const vectors = reinterpret_cast<uint4*>(data);
      print("as many bytes in order", 2 * bytes, Time(stream, [&] {
              LoadInOrder<<<4 * properties.multiProcessorCount, 512, 0, stream>>>(
                  vectors, 2 * bytes / int64_t{sizeof(uint4)}, vectors);
            }));
    }
    Check(cudaFree(table));
    Check(cudaFree(data));
  }
}
