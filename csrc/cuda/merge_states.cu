// Merging two attention results over disjoint sets of keys. A thread has a few neighbouring
// elements of a row. Each thread of a row computes the row's weights itself.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cinttypes>

#include "common/error.h"
#include "common/merge_weights.h"
#include "common/needs.h"
#include "common/tensor_view.h"
#include "cuda/fast_divide.h"
#include "cuda/launch.h"
#include "flashxla/merge_states.h"

namespace flashxla {
namespace {

constexpr int kThreads = 256;

// [T, H, D]; strides in elements.
struct Rows {
  char* data;
  int64_t stride_token, stride_head, stride_dim;

  explicit Rows(const flashxla_tensor& t)
      : data(static_cast<char*>(t.data)),
        stride_token(t.stride[0]),
        stride_head(t.stride[1]),
        stride_dim(t.stride[2]) {}

  // Address of an element.
  template <typename T>
  __device__ T* at(int64_t token, int64_t head, int64_t dim) const {
    return reinterpret_cast<T*>(data) + token * stride_token + head * stride_head +
           dim * stride_dim;
  }
};

// f32 [H, T].
struct Lse {
  float* data;
  int64_t stride_head, stride_token;

  explicit Lse(const flashxla_tensor& t)
      : data(static_cast<float*>(t.data)), stride_head(t.stride[0]), stride_token(t.stride[1]) {}

  __device__ float& at(int64_t token, int64_t head) const {
    return data[head * stride_head + token * stride_token];
  }
};

struct MergeArgs {
  Rows a, b, out;
  Lse lse_a, lse_b, lse;
  int64_t num_tokens;
  uint32_t num_columns, head_columns;  // vectors of a token, of a head
  FastDivide divide_columns;
  bool no_dims;  // head size 0: rows have an LSE and no elements
};

template <typename T, int kElements>
struct alignas(sizeof(T) * kElements) Vector {
  T x[kElements];
};

__device__ inline float ToFloat(float x) { return x; }
__device__ inline float ToFloat(__half x) { return __half2float(x); }
__device__ inline float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline void Narrow(float x, float* to) { *to = x; }
__device__ inline void Narrow(float x, __half* to) { *to = __float2half_rn(x); }
__device__ inline void Narrow(float x, __nv_bfloat16* to) { *to = __float2bfloat16_rn(x); }

template <typename T, int kElements>
__global__ void __launch_bounds__(kThreads) MergeKernel(const __grid_constant__ MergeArgs args) {
  using Part = Vector<T, kElements>;
  const uint32_t column = blockIdx.y * blockDim.x + threadIdx.x;
  const int64_t token = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (column >= args.num_columns || token >= args.num_tokens) return;
  const uint32_t head = args.divide_columns.Quotient(column);
  const uint32_t in_head = column - head * args.head_columns;
  const int64_t dim = int64_t{in_head} * kElements;
  Part a = {}, b = {};
  if (!args.no_dims) {
    a = *reinterpret_cast<const Part*>(args.a.at<T>(token, head, dim));
    b = *reinterpret_cast<const Part*>(args.b.at<T>(token, head, dim));
  }

  const MergeWeights weights = WeightsOf(args.lse_a.at(token, head), args.lse_b.at(token, head));
  if (in_head == 0) args.lse.at(token, head) = weights.lse;
  if (args.no_dims) return;

  Part out;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    // An input of weight 0 is not used: it may be NaN.
    const float x = weights.a == 0.f ? 0.f : weights.a * ToFloat(a.x[i]);
    const float y = weights.b == 0.f ? 0.f : weights.b * ToFloat(b.x[i]);
    Narrow(x + y, &out.x[i]);
  }
  *reinterpret_cast<Part*>(args.out.at<T>(token, head, dim)) = out;
}

// Whether a row can be read or written 16 bytes at a time.
bool InVectors(const flashxla_tensor& t) {
  constexpr int64_t kVector = 16;
  const int64_t size = ElementSize(t.dtype);
  auto multiple = [&](int i) { return t.shape[i] <= 1 || t.stride[i] * size % kVector == 0; };
  return t.stride[2] == 1 && t.shape[2] * size % kVector == 0 &&
         reinterpret_cast<uintptr_t>(t.data) % kVector == 0 && multiple(0) && multiple(1);
}

template <typename T, int kElements>
flashxla_status Launch(const flashxla_merge_states_args& args, cudaStream_t stream) {
  const int64_t num_tokens = args.out.shape[0];
  const int64_t head_columns = std::max<int64_t>(args.out.shape[2] / kElements, 1);
  const int64_t num_columns = args.out.shape[1] * head_columns;
  const TokenGrid grid(num_columns, num_tokens, kThreads, 1);
  if (!grid.fits) return SetError(FLASHXLA_INVALID_ARGUMENT, "merge_states: out_a is too large");
  const MergeArgs merge{Rows(args.out_a),
                        Rows(args.out_b),
                        Rows(args.out),
                        Lse(args.lse_a),
                        Lse(args.lse_b),
                        Lse(args.lse),
                        num_tokens,
                        static_cast<uint32_t>(num_columns),
                        static_cast<uint32_t>(head_columns),
                        FastDivide(head_columns),
                        args.out.shape[2] == 0};
  MergeKernel<T, kElements><<<grid.grid, grid.block, 0, stream>>>(merge);
  return LaunchStatus("merge_states");
}

template <typename T>
flashxla_status Merge(const flashxla_merge_states_args& args, cudaStream_t stream) {
  const bool vectors = InVectors(args.out_a) && InVectors(args.out_b) && InVectors(args.out);
  return vectors ? Launch<T, 16 / sizeof(T)>(args, stream) : Launch<T, 1>(args, stream);
}

flashxla_status MergeAny(const flashxla_merge_states_args& args, const flashxla_context* context) {
  if (IsAnswered(context, "merge_states", "each thread merges a few elements of a row"))
    return FLASHXLA_OK;
  const flashxla_tensor& out = args.out;
  if (out.shape[0] == 0 || out.shape[1] == 0) return FLASHXLA_OK;
  const cudaStream_t stream = StreamOf(context);
  switch (out.dtype) {
    case FLASHXLA_F32:
      return Merge<float>(args, stream);
    case FLASHXLA_F16:
      return Merge<__half>(args, stream);
    case FLASHXLA_BF16:
      return Merge<__nv_bfloat16>(args, stream);
    default:
      return SetError(FLASHXLA_INVALID_ARGUMENT, "merge_states: unsupported dtype %" PRId64,
                      out.dtype);
  }
}

}  // namespace
}  // namespace flashxla

flashxla_status flashxla_cuda_merge_states(const flashxla_merge_states_args* args,
                                           const flashxla_context* context) {
  return flashxla::Guarded("merge_states", [&] { return flashxla::MergeAny(*args, context); });
}
