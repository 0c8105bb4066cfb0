// Merging two attention results over disjoint sets of keys.
#include "flashxla/merge_states.h"

#include <algorithm>

#include "common/merge_weights.h"
#include "common/needs.h"
#include "common/tensor_view.h"
#include "cpu/dtypes.h"
#include "cpu/guard.h"
#include "cpu/parallel.h"

namespace flashxla {
namespace {

// Below this many elements, waking threads costs more than they save.
constexpr int64_t kInlineElements = 1 << 16;

struct Rows {  // [T, H, D]
  char* data;
  int64_t size, stride_token, stride_head, stride_dim;

  explicit Rows(const flashxla_tensor& t)
      : data(static_cast<char*>(t.data)),
        size(ElementSize(t.dtype)),
        stride_token(t.stride[0]),
        stride_head(t.stride[1]),
        stride_dim(t.stride[2]) {}
  char* at(int64_t token, int64_t head) const {
    return data + (token * stride_token + head * stride_head) * size;
  }
};

// dst = weight_a * a + weight_b * b. An input of weight 0 is not used: it may be NaN.
template <typename Format>
void MergeRow(const char* a_bytes, int64_t a_stride, float weight_a, const char* b_bytes,
              int64_t b_stride, float weight_b, char* dst_bytes, int64_t dst_stride, int64_t n) {
  const auto* a = reinterpret_cast<const typename Format::Bits*>(a_bytes);
  const auto* b = reinterpret_cast<const typename Format::Bits*>(b_bytes);
  auto* dst = reinterpret_cast<typename Format::Bits*>(dst_bytes);
  auto merge = [&](int64_t i, int64_t a_step, int64_t b_step, int64_t dst_step) {
    const float x = weight_a == 0.0f ? 0.0f : weight_a * Format::Decode(a[i * a_step]);
    const float y = weight_b == 0.0f ? 0.0f : weight_b * Format::Decode(b[i * b_step]);
    dst[i * dst_step] = Format::Encode(x + y);
  };
  if (a_stride == 1 && b_stride == 1 && dst_stride == 1) {
    for (int64_t i = 0; i < n; ++i) merge(i, 1, 1, 1);
  } else {
    for (int64_t i = 0; i < n; ++i) merge(i, a_stride, b_stride, dst_stride);
  }
}

template <typename Format>
void MergeTokens(const flashxla_merge_states_args& args, int64_t begin, int64_t end) {
  const Rows a(args.out_a), b(args.out_b), out(args.out);
  const int64_t num_heads = args.out.shape[1], head_size = args.out.shape[2];
  for (int64_t token = begin; token < end; ++token) {
    for (int64_t head = 0; head < num_heads; ++head) {
      const MergeWeights weights =
          WeightsOf(LseAt(args.lse_a, token, head), LseAt(args.lse_b, token, head));
      LseAt(args.lse, token, head) = weights.lse;
      MergeRow<Format>(a.at(token, head), a.stride_dim, weights.a, b.at(token, head), b.stride_dim,
                       weights.b, out.at(token, head), out.stride_dim, head_size);
    }
  }
}

flashxla_status Merge(const flashxla_merge_states_args& args, const flashxla_context* context) {
  if (IsAnswered(context, "merge_states", "vectorized, one row of a head at a time"))
    return FLASHXLA_OK;
  const int64_t num_tokens = args.out.shape[0];
  const int64_t row_elements = std::max<int64_t>(args.out.shape[1] * args.out.shape[2], 1);
  const int64_t chunk = std::max<int64_t>(kInlineElements / row_elements, 1);
  ParallelChunks(context, 0, num_tokens, chunk, [&](int64_t begin, int64_t end) {
    WithFormat(args.out.dtype,
               [&](auto format) { MergeTokens<decltype(format)>(args, begin, end); });
  });
  return FLASHXLA_OK;
}

}  // namespace
}  // namespace flashxla

flashxla_status flashxla_cpu_merge_states(const flashxla_merge_states_args* args,
                                          const flashxla_context* context) {
  return flashxla::GuardedOnCpu("merge_states", [&] { return flashxla::Merge(*args, context); });
}
