// Writing new keys and values into a paged cache.
//
// A column is a few neighbouring elements of one head's key or value. A thread writes one column
// for one or several tokens. It computes the column's place once, and the loads of all its tokens
// and of their slots are in flight together.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "common/error.h"
#include "common/needs.h"
#include "common/tensor_view.h"
#include "common/write_arguments.h"
#include "cuda/check.h"
#include "cuda/fast_divide.h"
#include "cuda/fp8_encode.cuh"
#include "cuda/launch.h"
#include "flashxla/kv_cache.h"

namespace flashxla {
namespace {

// With this many columns, threads that each take kManyTokens tokens still fill a large GPU.
constexpr int64_t kManyColumns = 1 << 18;
constexpr int kManyTokens = 4;
constexpr int kManyThreads = 256, kFewThreads = 128;  // per block

// Keys or values. Strides in bytes.
struct Half {
  const char* src;
  char* dst;
  int64_t src_token, src_head, src_column;
  int64_t dst_block, dst_token, dst_head, dst_column;
  const float* scale;  // null: 1
  int64_t scale_head;  // in elements
};

struct WriteArgs {
  Half halves[2];
  const void* slots;
  int64_t slot_stride, num_tokens, num_slots, block_size;
  FastDivide divide_block_size;
  // Columns per head of keys and of values; per token, all keys' columns before the values'.
  FastDivide key_head_columns, value_head_columns;
  uint32_t key_columns, num_columns;
  bool slots_are_i64;
};

// A column of kElements elements that are copied unchanged.
template <typename Vector, typename Element>
struct Copy {
  static constexpr int kElements = sizeof(Vector) / sizeof(Element);
  Vector x;

  __device__ void Load(const char* src) { x = *reinterpret_cast<const Vector*>(src); }
  __device__ void Store(char* dst, float) const { *reinterpret_cast<Vector*>(dst) = x; }
};

// A column of one element, converted to fp8.
template <typename From, __nv_fp8_interpretation_t kFormat>
struct Quantize {
  static constexpr int kElements = 1;
  From x;

  __device__ void Load(const char* src) { x = *reinterpret_cast<const From*>(src); }
  __device__ void Store(char* dst, float scale) const {
    *dst = static_cast<char>(EncodeFp8x2<kFormat>(static_cast<float>(x), 0.f, scale));
  }
};

__device__ inline float2 Widen(uint32_t pair, __half) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}
__device__ inline float2 Widen(uint32_t pair, __nv_bfloat16) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// A column of eight elements, converted to fp8.
template <typename From, __nv_fp8_interpretation_t kFormat>
struct QuantizeEight {
  static constexpr int kElements = 8;
  static constexpr int kVectors = sizeof(From) / 2;
  uint4 x[kVectors];

  __device__ void Load(const char* src) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) x[i] = reinterpret_cast<const uint4*>(src)[i];
  }
  __device__ float2 Pair(int i) const {
    if constexpr (std::is_same_v<From, float>) {
      const uint4& y = x[i / 2];
      return i % 2 ? make_float2(__uint_as_float(y.z), __uint_as_float(y.w))
                   : make_float2(__uint_as_float(y.x), __uint_as_float(y.y));
    } else {
      return Widen(i == 0 ? x[0].x : i == 1 ? x[0].y : i == 2 ? x[0].z : x[0].w, From());
    }
  }
  __device__ void Store(char* dst, float scale) const {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = Pair(i);
      pairs[i] = EncodeFp8x2<kFormat>(pair.x, pair.y, scale);
    }
    *reinterpret_cast<uint2*>(dst) =
        make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
  }
};

template <typename Column, int kTokens>
__global__ void __launch_bounds__(kTokens > 1 ? kManyThreads : kFewThreads)
    WriteKernel(const __grid_constant__ WriteArgs args) {
  TriggerNext();
  WaitForPrevious();
  const uint32_t column = blockIdx.y * blockDim.x + threadIdx.x;
  if (column >= args.num_columns) return;
  const uint32_t which = column >= args.key_columns;
  const uint32_t in_half = column - which * args.key_columns;
  const FastDivide head_columns = which ? args.value_head_columns : args.key_head_columns;
  const uint32_t head = head_columns.Quotient(in_half);
  const uint32_t in_head = in_half - head * head_columns.divisor;
  const Half& half = args.halves[which];
  const char* src = half.src + head * half.src_head + in_head * half.src_column;
  char* dst = half.dst + head * half.dst_head + in_head * half.dst_column;
  const float scale = half.scale == nullptr ? 1.f : half.scale[head * half.scale_head];

  const int64_t first = int64_t{blockIdx.x} * kTokens * blockDim.y + threadIdx.y;
  Column x[kTokens];
  int64_t slot[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const int64_t token = first + i * blockDim.y;
    slot[i] = -1;
    if (token >= args.num_tokens) continue;
    x[i].Load(src + token * half.src_token);
    slot[i] = args.slots_are_i64
                  ? static_cast<const int64_t*>(args.slots)[token * args.slot_stride]
                  : static_cast<const int32_t*>(args.slots)[token * args.slot_stride];
  }
  const bool narrow = args.num_slots <= INT32_MAX;
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    if (slot[i] < 0 || slot[i] >= args.num_slots) continue;
    const int64_t block = narrow ? args.divide_block_size.Quotient(static_cast<uint32_t>(slot[i]))
                                 : slot[i] / args.block_size;
    const int64_t offset = slot[i] - block * args.block_size;
    x[i].Store(dst + block * half.dst_block + offset * half.dst_token, scale);
  }
}

bool Multiple(int64_t stride, int64_t count, int64_t unit) {
  return count <= 1 || stride % unit == 0;
}

// The shapes and strides of a half, in elements.
struct HalfTensors {
  const flashxla_tensor& tensor;
  const CacheView& cache;
  ScaleView scale;
  int64_t src_size, dst_size;  // of an element

  // Whether shapes, strides and addresses allow columns of type Column.
  template <typename Column>
  bool Allows() const {
    if (Column::kElements == 1) return true;
    auto aligned = [](const void* p, int64_t unit) {
      return reinterpret_cast<uintptr_t>(p) % unit == 0;
    };
    const int64_t src = std::min<int64_t>(Column::kElements * src_size, 16);  // the widest load
    const int64_t dst = Column::kElements * dst_size;
    return cache.head_size % Column::kElements == 0 && tensor.stride[2] == 1 &&
           cache.stride_dim == 1 && aligned(tensor.data, src) && aligned(cache.data, dst) &&
           Multiple(tensor.stride[0] * src_size, tensor.shape[0], src) &&
           Multiple(tensor.stride[1] * src_size, cache.num_heads, src) &&
           Multiple(cache.stride_block * dst_size, cache.num_blocks, dst) &&
           Multiple(cache.stride_token * dst_size, cache.block_size, dst) &&
           Multiple(cache.stride_head * dst_size, cache.num_heads, dst);
  }

  Half InColumns(int elements) const {
    return {static_cast<const char*>(tensor.data),
            cache.data,
            tensor.stride[0] * src_size,
            tensor.stride[1] * src_size,
            tensor.stride[2] * src_size * elements,
            cache.stride_block * dst_size,
            cache.stride_token * dst_size,
            cache.stride_head * dst_size,
            cache.stride_dim * dst_size * elements,
            scale.data,
            scale.stride_head};
  }
};

struct Write {
  HalfTensors key, value;
  WriteArgs args;  // Launch fills in what depends on the columns
  cudaStream_t stream;

  template <typename Column>
  flashxla_status Launch() {
    args.halves[0] = key.InColumns(Column::kElements);
    args.halves[1] = value.InColumns(Column::kElements);
    const int64_t key_head_columns = key.cache.head_size / Column::kElements;
    const int64_t value_head_columns = value.cache.head_size / Column::kElements;
    const int64_t key_columns = key.cache.num_heads * key_head_columns;
    const int64_t num_columns = key_columns + value.cache.num_heads * value_head_columns;
    const bool many = num_columns * args.num_tokens >= kManyColumns;
    const TokenGrid grid(num_columns, args.num_tokens, many ? kManyThreads : kFewThreads,
                         many ? kManyTokens : 1);
    if (!grid.fits) return SetError(FLASHXLA_INVALID_ARGUMENT, "kv_cache: key is too large");
    args.key_columns = static_cast<uint32_t>(key_columns);
    args.num_columns = static_cast<uint32_t>(num_columns);
    args.key_head_columns = FastDivide(key_head_columns);
    args.value_head_columns = FastDivide(value_head_columns);
    LaunchDependent(many ? WriteKernel<Column, kManyTokens> : WriteKernel<Column, 1>, grid.grid,
                    grid.block, 0, stream, args);
    return LaunchStatus("kv_cache");
  }

  // Launches with the first type of column that both halves allow.
  template <typename Column, typename... Others>
  flashxla_status LaunchWidest() {
    if constexpr (sizeof...(Others) > 0) {
      if (!key.Allows<Column>() || !value.Allows<Column>()) return LaunchWidest<Others...>();
    }
    return Launch<Column>();
  }

  template <typename From>
  flashxla_status LaunchQuantize(int64_t cache_dtype) {
    if (cache_dtype == FLASHXLA_F8E4M3) {
      return LaunchWidest<QuantizeEight<From, __NV_E4M3>, Quantize<From, __NV_E4M3>>();
    }
    return LaunchWidest<QuantizeEight<From, __NV_E5M2>, Quantize<From, __NV_E5M2>>();
  }

  flashxla_status LaunchCopy() {
    switch (key.src_size) {
      case 4:
        return LaunchWidest<Copy<uint4, uint32_t>, Copy<uint2, uint32_t>,
                            Copy<uint32_t, uint32_t>>();
      case 2:
        return LaunchWidest<Copy<uint4, uint16_t>, Copy<uint2, uint16_t>, Copy<uint32_t, uint16_t>,
                            Copy<uint16_t, uint16_t>>();
      default:
        return LaunchWidest<Copy<uint4, uint8_t>, Copy<uint8_t, uint8_t>>();
    }
  }
};

flashxla_status WriteCache(const flashxla_kv_cache_args& args, const flashxla_context* context) {
  CacheView key_view, value_view;
  if (const flashxla_status status = ViewWrite(args, &key_view, &value_view);
      status != FLASHXLA_OK) {
    return status;
  }
  if (IsAnswered(context, "kv_cache", "each thread writes a few elements of a token"))
    return FLASHXLA_OK;
  const int64_t from = args.key.dtype, to = args.cache_dtype;
  const flashxla_tensor& slots = args.slot_mapping;
  const int64_t num_tokens = slots.shape[0];
  const int64_t num_slots = key_view.num_blocks * key_view.block_size;
  if (const flashxla_status status = CheckSlotMapping(slots, num_slots, context);
      status != FLASHXLA_OK) {
    return status;
  }
  const int64_t head_sizes = key_view.head_size + value_view.head_size;
  if (num_tokens == 0 || num_slots == 0 || key_view.num_heads * head_sizes == 0) {
    return FLASHXLA_OK;
  }
  Write write{{args.key, key_view, ScaleView(args.k_scale), ElementSize(from), ElementSize(to)},
              {args.value, value_view, ScaleView(args.v_scale), ElementSize(from), ElementSize(to)},
              {},
              StreamOf(context)};
  write.args.slots = slots.data;
  write.args.slot_stride = slots.stride[0];
  write.args.slots_are_i64 = slots.dtype == FLASHXLA_I64;
  write.args.num_tokens = num_tokens;
  write.args.num_slots = num_slots;
  write.args.block_size = key_view.block_size;
  if (num_slots <= INT32_MAX) write.args.divide_block_size = FastDivide(key_view.block_size);
  if (from == to) return write.LaunchCopy();
  switch (from) {
    case FLASHXLA_F32:
      return write.LaunchQuantize<float>(to);
    case FLASHXLA_F16:
      return write.LaunchQuantize<__half>(to);
    default:
      return write.LaunchQuantize<__nv_bfloat16>(to);
  }
}

}  // namespace
}  // namespace flashxla

flashxla_status flashxla_cuda_kv_cache(const flashxla_kv_cache_args* args,
                                       const flashxla_context* context) {
  return flashxla::Guarded("kv_cache", [&] { return flashxla::WriteCache(*args, context); });
}
