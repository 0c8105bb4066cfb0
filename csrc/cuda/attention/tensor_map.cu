#include <cuda_runtime.h>

#include <cstdio>

#include "common/tensor_view.h"
#include "cuda/attention/tensor_map.h"

namespace flashxla::attention {
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);

// From the driver that is loaded: the library itself does not link with it.
Encode FindEncode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  constexpr char kName[] = "cuTensorMapEncodeTiled";
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(kName, &function, 12000, cudaEnableDefault, &result);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(kName, &function, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
}

Encode GetEncode() {
  static const Encode encode = FindEncode();
  return encode;
}

// The innermost dimension first; strides in elements.
bool MakeTensorMap(const void* data, int64_t dtype, int rank, const int64_t* sizes,
                   const int64_t* strides, const int* box, CUtensorMapL2promotion promotion,
                   CUtensorMap* map) {
  constexpr int kMaxRank = 4;
  cuuint64_t size[kMaxRank], stride[kMaxRank];
  cuuint32_t box_size[kMaxRank], element_stride[kMaxRank];
  const bool is_byte = IsFp8(dtype);
  for (int i = 0; i < rank; ++i) {
    size[i] = sizes[i];
    box_size[i] = box[i];
    element_stride[i] = 1;
    // The stride of a dimension of size 1 does not matter, but the driver wants a valid one.
    if (i > 0) stride[i - 1] = sizes[i] == 1 ? 16 : strides[i] * (is_byte ? 1 : 2);
  }
  const CUtensorMapDataType type = is_byte                 ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : dtype == FLASHXLA_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                           : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return GetEncode() != nullptr &&
         GetEncode()(map, type, rank, const_cast<void*>(data), size, stride, box_size,
                     element_stride, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

int64_t UnitOf(const Cache& cache, int64_t size, int64_t address) {
  if (cache.stride_dim != 1) return size;
  return CommonUnit({address, cache.head_size * size, cache.stride_block * size,
                     cache.stride_token * size, cache.stride_head * size});
}

const char* WhyNoKeys(const Problem& p) {
  const bool none = p.block_table.num_blocks == 0 || p.block_table.block_size == 0;
  return none ? "there are no keys" : "";
}

const char* WhyNoCacheBoxes(const Problem& p, int least) {
  const BlockTable& table = p.block_table;
  if (const char* why = WhyNoKeys(p); why[0] != '\0') return why;
  if (table.data != nullptr && KeysOfBox(p, least) < least) {
    static thread_local char why[64];  // valid until this thread's next call
    std::snprintf(why, sizeof(why), "the page size is not a multiple of %d", least);
    return why;
  }
  if (!p.kv_vectors()) return "strides or addresses of the keys are not multiples of 16 bytes";
  for (const Cache* c : {&p.k, &p.v}) {
    if (!TakesStride(p.num_kv_heads, c->stride_head) ||
        !TakesStride(table.block_size, c->stride_token) ||
        !TakesStride(table.num_blocks, c->stride_block)) {
      return "TMA does not support the strides of the keys";
    }
  }
  return "";
}

int KeysOfBox(const Problem& p, int most) {
  if (p.block_table.data == nullptr) return most;
  int keys = most & -most;
  while (p.block_table.block_size % keys != 0) keys /= 2;
  return keys;
}

bool MapRows(const Rows& rows, int64_t dtype, int64_t num_tokens, int64_t num_heads,
             int64_t head_size, int box_columns, int box_heads, int box_tokens, CUtensorMap* map) {
  const int64_t sizes[3] = {head_size, num_heads, num_tokens};
  const int64_t strides[3] = {1, rows.stride_head, rows.stride_token};
  const int box[3] = {box_columns, box_heads, box_tokens};
  return MakeTensorMap(rows.data, dtype, 3, sizes, strides, box, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                       map);
}

bool MapQueries(const Problem& p, int box_columns, int box_heads, int box_tokens,
                CUtensorMap* map) {
  return MapRows(p.q, p.q_dtype, p.num_tokens, p.num_heads, p.k.head_size, box_columns, box_heads,
                 box_tokens, map);
}

bool MapCache(const Problem& p, const Cache& c, int columns, int keys, bool once,
              CUtensorMap* map) {
  const int64_t together = p.few.heads_together;
  const int64_t sizes[4] = {c.head_size * together, p.num_kv_heads, p.block_table.block_size,
                            p.block_table.num_blocks};
  const int64_t strides[4] = {1, c.stride_head * together, c.stride_token, c.stride_block};
  const int box[4] = {columns, 1, keys, 1};
  // What L2 brings from memory at a time. Of keys that are read once it is at most a row: a part of
  // the next row may be lost before it is wanted.
  const bool long_rows = c.head_size * ElementSize(p.kv_dtype) % 256 == 0;
  const CUtensorMapL2promotion promotion = !once || together > 1
                                               ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B
                                           : long_rows ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B
                                                       : CU_TENSOR_MAP_L2_PROMOTION_NONE;
  return MakeTensorMap(c.data, p.kv_dtype, 4, sizes, strides, box, promotion, map);
}

}  // namespace flashxla::attention
