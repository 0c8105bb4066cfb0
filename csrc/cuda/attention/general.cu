// general: any sequence with any head sizes, dtypes and strides. One warp per row (a query token of
// one head), one key at a time: simple rather than fast.
#include <algorithm>
#include <type_traits>

#include "common/attention_arguments.h"
#include "cuda/attention/dtypes.cuh"
#include "cuda/attention/engines.h"
#include "cuda/attention/warp.cuh"

namespace flashxla::attention {
namespace {

constexpr int kWarps = 4;
constexpr int kLanes = 32;
// Lane l holds dims l, l + 32, ... of each row.
constexpr int kKeyDims = kMaxHeadSize / kLanes, kValueDims = kMaxValueHeadSize / kLanes;
static_assert(kMaxHeadSize % kLanes == 0 && kMaxValueHeadSize % kLanes == 0);

// This lane's dims of the row that starts at element `offset`; zeros past the head size.
template <int kDims>
__device__ void LoadRow(const char* data, int64_t offset, int64_t stride_dim, int head_size,
                        int dtype, float (&row)[kDims]) {
  const int lane = threadIdx.x % kLanes;
#pragma unroll
  for (int i = 0; i < kDims; ++i) {
    const int d = i * kLanes + lane;
    row[i] = d < head_size ? LoadFloat(data, offset + d * stride_dim, dtype) : 0.f;
  }
}

template <int kDtype>
__device__ void Attend(const Problem& p, const PlannedSequence& s, int index, int token, int head) {
  const int lane = threadIdx.x % kLanes;
  const int kv_head = head / p.group_size, query = token - s.first_query;
  float q[kKeyDims], out[kValueDims] = {};
  LoadRow(p.q.data, token * p.q.stride_token + head * p.q.stride_head, p.q.stride_dim,
          p.k.head_size, p.q_dtype, q);
  const float scale = p.ScoreScale(index, kv_head), slope = p.alibi_slopes.at(index, head, 0.f);
  const int64_t diagonal = int64_t{query} + s.length - s.num_queries;
  float row_max = -INFINITY, row_sum = 0.f;
  const KeyRange keys = p.Visible(s, query);
  for (int first = keys.begin; first < keys.end; first += kLanes) {
    // Each lane locates one of the next 32 keys.
    int block = 0, place = 0;
    const bool exists = first + lane < keys.end && p.Locate(s, index, first + lane, &block, &place);
    unsigned left = __ballot_sync(kAllLanes, exists);
    while (left != 0) {
      const int n = __ffs(left) - 1;
      left &= left - 1;
      const int64_t key_block = __shfl_sync(kAllLanes, block, n);
      const int64_t key_place = __shfl_sync(kAllLanes, place, n);
      float k[kKeyDims], v[kValueDims];
      LoadRow(
          p.k.data,
          key_block * p.k.stride_block + key_place * p.k.stride_token + kv_head * p.k.stride_head,
          p.k.stride_dim, p.k.head_size, kDtype, k);
      LoadRow(
          p.v.data,
          key_block * p.v.stride_block + key_place * p.v.stride_token + kv_head * p.v.stride_head,
          p.v.stride_dim, p.v.head_size, kDtype, v);
      float dot = 0.f;
#pragma unroll
      for (int i = 0; i < kKeyDims; ++i) dot = fmaf(q[i], k[i], dot);
      for (int lanes = kLanes / 2; lanes > 0; lanes /= 2)
        dot += __shfl_xor_sync(kAllLanes, dot, lanes);
      const float score = p.Score(dot * scale, slope, diagonal - (first + n)) * kLog2e;
      const float new_max = fmaxf(row_max, score);
      const float base = SoftmaxBase(new_max);
      const float factor = exp2f(row_max - base), weight = exp2f(score - base);
      row_max = new_max;
      row_sum = row_sum * factor + weight;
#pragma unroll
      for (int i = 0; i < kValueDims; ++i) {
        out[i] *= factor;
        if (weight != 0.f) out[i] = fmaf(weight, v[i], out[i]);  // the value may be NaN
      }
    }
  }
  const RowEnd end = {row_max, row_sum, p.Sink(head)};
  const float whole = end.Factor() * p.ValueScale(index, kv_head);
  if (lane == 0) p.StoreLse(token, head, end);
#pragma unroll
  for (int i = 0; i < kValueDims; ++i) {
    const int d = i * kLanes + lane;
    if (d < p.v.head_size) p.StoreOut(token, head, d, out[i] * whole);
  }
}

// Whether the engine before has served all sequences. All threads of the block must call it.
__device__ bool AreAllServed(const Problem& p) {
  bool served = true;
  for (int i = threadIdx.x; i < p.index.num_sequences; i += kWarps * kLanes) {
    served &= p.served[i] >= 0;
  }
  return __syncthreads_and(served);
}

template <int kDtype>
__global__ void __launch_bounds__(kWarps* kLanes) GeneralKernel(const __grid_constant__ Problem p) {
  TriggerNext();
  WaitForPrevious();
  if (p.served != nullptr && AreAllServed(p)) return;
  // Backwards: the last rows of a sequence see the most keys and should start first.
  const int64_t warp = int64_t{blockIdx.x} * kWarps + threadIdx.x / kLanes;
  for (int64_t row = int64_t{p.num_tokens} * p.num_heads - 1 - warp; row >= 0;
       row -= int64_t{gridDim.x} * kWarps) {
    const int token = static_cast<int>(row / p.num_heads);
    const int index = p.plan.token_sequence[token];
    if (index < 0) continue;  // combine.cu writes it
    if (p.served != nullptr && p.served[index] >= 0) continue;
    const PlannedSequence s = p.plan.sequences[index];
    if (s.role == kRest) Attend<kDtype>(p, s, index, token, static_cast<int>(row % p.num_heads));
  }
}

const char* WhyNotGeneral(const Facts&) { return ""; }

flashxla_status LaunchGeneral(const Problem& p, void*, cudaStream_t stream) {
  const int64_t rows = int64_t{p.num_tokens} * p.num_heads;
  const int64_t blocks =
      std::min<int64_t>((rows + kWarps - 1) / kWarps, 8 * int64_t{NumMultiprocessors()});
  auto launch = [&](auto dtype) {
    LaunchDependent(GeneralKernel<decltype(dtype)::value>, static_cast<unsigned>(blocks),
                    kWarps * kLanes, 0, stream, p);
  };
  switch (p.kv_dtype) {
    case FLASHXLA_F32:
      launch(std::integral_constant<int, FLASHXLA_F32>{});
      break;
    case FLASHXLA_F16:
      launch(std::integral_constant<int, FLASHXLA_F16>{});
      break;
    case FLASHXLA_BF16:
      launch(std::integral_constant<int, FLASHXLA_BF16>{});
      break;
    case FLASHXLA_F8E4M3:
      launch(std::integral_constant<int, FLASHXLA_F8E4M3>{});
      break;
    default:
      launch(std::integral_constant<int, FLASHXLA_F8E5M2>{});
  }
  return FLASHXLA_OK;
}

}  // namespace

const Engine kGeneralEngine = {
    "general", "CUDA cores, any head size", kRest, WhyNotGeneral, nullptr, LaunchGeneral};

}  // namespace flashxla::attention
