#include <algorithm>
#include <iterator>

#include "common/tensor_view.h"
#include "cuda/attention_backward/aligned_copies.h"

namespace flashxla::attention_backward {
namespace {

using Arguments = flashxla_attention_backward_args;
using Field = flashxla_tensor Arguments::*;

constexpr Field kRead[] = {&Arguments::q, &Arguments::k, &Arguments::v, &Arguments::grad_out,
                           &Arguments::out};
constexpr Field kWritten[] = {&Arguments::grad_q, &Arguments::grad_k, &Arguments::grad_v};

constexpr int kThreads = 256;
// Tokens of a thread, at the same place in each: their loads are in flight together.
constexpr int kTokens = 8;

// A tensor [tokens, heads, D] in units of some bytes; strides in bytes.
struct Units {
  char* data;
  int64_t stride_token, stride_head, stride_unit;
  int32_t head_size;  // in units
};

struct Copy {
  Units from, to;  // units that `from` does not have are 0
  int64_t num_tokens;
  int32_t num_heads;
  int32_t unit;  // bytes: 8, 4 or 2

  __host__ __device__ int64_t num_columns() const { return int64_t{num_heads} * to.head_size; }
  // Threads that have something to do.
  __host__ __device__ int64_t num_items() const {
    return (num_tokens + kTokens - 1) / kTokens * num_columns();
  }
};

struct Copies {
  Copy all[std::size(kRead)];
};

// Where a unit of a head lies in the first token.
__device__ char* PlaceOf(const Units& units, int head, int unit) {
  return units.data + head * units.stride_head + unit * units.stride_unit;
}

template <typename Unit>
__device__ void CopyUnits(const Copy& c) {
  const int64_t num_columns = c.num_columns(), num_items = c.num_items();
  const int64_t from_stride = c.from.stride_token, to_stride = c.to.stride_token;
  for (int64_t item = int64_t{blockIdx.x} * kThreads + threadIdx.x; item < num_items;
       item += int64_t{gridDim.x} * kThreads) {
    const int64_t group = item / num_columns, first = group * kTokens;
    const int column = static_cast<int>(item - group * num_columns);
    const int head = column / c.to.head_size, unit = column - head * c.to.head_size;
    const char* from = PlaceOf(c.from, head, unit) + first * from_stride;
    char* to = PlaceOf(c.to, head, unit) + first * to_stride;
    const int writes = static_cast<int>(min(c.num_tokens - first, int64_t{kTokens}));
    const int reads = unit < c.from.head_size ? writes : 0;
    Unit x[kTokens] = {};
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (i < reads) x[i] = *reinterpret_cast<const Unit*>(from + i * from_stride);
    }
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (i < writes) *reinterpret_cast<Unit*>(to + i * to_stride) = x[i];
    }
  }
}

__global__ void __launch_bounds__(kThreads) CopyKernel(const __grid_constant__ Copies copies) {
  const Copy& c = copies.all[blockIdx.y];
  if (c.unit == 8) {
    CopyUnits<uint2>(c);
  } else if (c.unit == 4) {
    CopyUnits<uint32_t>(c);
  } else {
    CopyUnits<uint16_t>(c);
  }
}

// The most bytes, up to 8, in which all of a tensor can be read and written.
int64_t UnitOf(const flashxla_tensor& t) {
  const int64_t size = ElementSize(t.dtype);
  if (t.stride[2] != 1) return size;
  const int64_t unit =
      CommonUnit({AddressOf(t.data), t.shape[2] * size, t.stride[0] * size, t.stride[1] * size});
  return std::min<int64_t>(unit, 8);
}

Units UnitsOf(const flashxla_tensor& t, int64_t unit) {
  const int64_t size = ElementSize(t.dtype);
  return {static_cast<char*>(t.data), t.stride[0] * size, t.stride[1] * size,
          t.stride[2] == 1 ? unit : t.stride[2] * size,
          static_cast<int32_t>(t.shape[2] * size / unit)};
}

// Copies of a call's fields: to the copies of the aligned call, or from them.
template <size_t kFields>
void Launch(const Field (&fields)[kFields], const Arguments& args, const AlignedCall& call,
            bool back, cudaStream_t stream) {
  Copies copies = {};
  unsigned count = 0;
  int64_t most = 0;
  for (const Field field : fields) {
    const flashxla_tensor &given = args.*field, &aligned = call.args.*field;
    if (aligned.data == given.data) continue;  // it has no copy
    const int64_t unit = UnitOf(given);
    Copy& c = copies.all[count++];
    c.from = UnitsOf(back ? aligned : given, unit), c.to = UnitsOf(back ? given : aligned, unit);
    c.num_tokens = given.shape[0], c.num_heads = static_cast<int32_t>(given.shape[1]);
    c.unit = static_cast<int32_t>(unit);
    most = std::max(most, c.num_items());
  }
  if (most == 0) return;
  const int64_t blocks = std::min<int64_t>((most + kThreads - 1) / kThreads, 1 << 16);
  CopyKernel<<<dim3(static_cast<unsigned>(blocks), count), kThreads, 0, stream>>>(copies);
}

}  // namespace

bool InVectors(const flashxla_tensor& t) {
  const int64_t size = ElementSize(t.dtype);
  return t.stride[2] == 1 &&
         CommonUnit({t.shape[2] * size, t.stride[0] * size, t.stride[1] * size}) == 16;
}

AlignedCall AlignedCallOf(const Arguments& args) {
  AlignedCall call = {args, 0};
  auto* memory = static_cast<char*>(args.workspace.data);
  auto align = [&](flashxla_tensor& t) {
    if (InVectors(t)) return;
    const int64_t size = ElementSize(t.dtype);
    t.shape[2] = (t.shape[2] * size + 15) / 16 * 16 / size;
    t.stride[2] = 1, t.stride[1] = t.shape[2], t.stride[0] = t.shape[1] * t.shape[2];
    if (memory != nullptr) t.data = memory + call.bytes;
    call.bytes += PartBytes(t.shape[0] * t.stride[0] * size);
  };
  for (const Field field : kRead) align(call.args.*field);
  for (const Field field : kWritten) align(call.args.*field);
  if (memory != nullptr) call.args.workspace.data = memory + call.bytes;
  call.args.workspace.shape[0] -= call.bytes;
  return call;
}

void LaunchFill(const Arguments& args, const AlignedCall& call, cudaStream_t stream) {
  Launch(kRead, args, call, false, stream);
}

void LaunchReturn(const Arguments& args, const AlignedCall& call, cudaStream_t stream) {
  Launch(kWritten, args, call, true, stream);
}

}  // namespace flashxla::attention_backward
