// Heads above 128: the gradients of 64 keys take the registers of both consumer warpgroups. Each
// has half of their columns (WideColumn), and computes the scores of half of the queries; weights
// and the gradients of the scores go through shared memory.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_WIDE_BY_COLUMNS_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_WIDE_BY_COLUMNS_CUH_

#include <type_traits>

#include "cuda/attention_backward/wide_consumer.cuh"

namespace flashxla::attention_backward {

#if defined(FLASHXLA_HOPPER)

// The columns of a warpgroup, as wgmma's accumulators hold them.
template <int kDims>
struct WideColumns {
  static constexpr int kWhole = WideWholeColumns(kDims), kRest = kDims / 2 - kWhole;
  static constexpr int kCount = kDims / 4;
  float whole[kWhole / 2], rest[kRest > 0 ? kRest / 2 : 1];

  __device__ void Zero() {
#pragma unroll
    for (float& x : whole) x = 0.f;
#pragma unroll
    for (float& x : rest) x = 0.f;
  }
  __device__ void PinAll() {
    Pin(whole);
    if (kRest > 0) Pin(rest);
  }
  // = or += a b, with a [64 x 16] at the descriptor `a`, and 16 rows at address `b`, of which these
  // columns are taken. block: bytes between blocks of columns.
  template <typename T, bool kTurnA>
  __device__ void Start(int group, uint64_t a, uint32_t b, uint32_t block, bool add) {
    auto at = [&](int column) {
      return column / kBlockColumns * block + column % kBlockColumns * 2;
    };
    auto from = [&](int i) {
      const uint32_t first = at(WideColumn(kDims, 0, i)), second = at(WideColumn(kDims, 1, i));
      return b + first + group * (second - first);
    };
    MatrixProduct<T, kWhole>::template Start<kTurnA, true>(whole, a,
                                                           MatrixDescriptor(from(0), block), add);
    if constexpr (kRest > 0) {
      MatrixProduct<T, kRest>::template Start<kTurnA, true>(rest, a,
                                                            MatrixDescriptor(from(kWhole), 0), add);
    }
  }
  __device__ float4 Vector(int i) const {
    const float* from = i * 4 < kWhole / 2 ? whole + i * 4 : rest + (i * 4 - kWhole / 2);
    return make_float4(from[0], from[1], from[2], from[3]);
  }
  template <typename T>
  __device__ void Store(const Rows& to, const WideItem& item, int head_size, int row, int group,
                        float scale) const {
    StoreKeys<T, kWhole>(to, item, head_size, row, WideColumn(kDims, group, 0), scale, whole);
    if constexpr (kRest > 0) {
      StoreKeys<T, kRest>(to, item, head_size, row, WideColumn(kDims, group, kWhole), scale, rest);
    }
  }
};

template <typename T, typename S>
__device__ void ConsumeByColumns(const WideProblem& w, const WideShared<S>& shared) {
  constexpr int kDims = S::kDims, kValueDims = S::kValueDims;
  const Problem& p = w.p;
  const int lane = threadIdx.x & 31, group = ConsumerGroup();
  constexpr int kQueries = kRowTile / 2;  // whose scores a warpgroup computes
  using Columns = WideColumns<kDims>;     // of gradients of queries and keys
  constexpr int kSumsEach = Columns::kCount / S::kSumParts;
  static_assert(S::kKeyTile == 64);
  const int warp_row = threadIdx.x % kWarpgroupThreads / 32 * 16, row = warp_row + lane / 4;
  uint32_t steps = 0;

  for (uint32_t items = 0;; ++items) {
    attention::WaitBarrier(shared.keys_full(), items % 2);
    const int num_steps = StepsOfItem(shared);
    if (num_steps < 0) return;
    const KeyRows rows(p, LoadShared<WideItem>(shared.item()), 0, row);
    Columns grad_k;
    WideColumns<kValueDims> grad_v;
    grad_k.Zero(), grad_v.Zero();

    // c = keys or values times this warpgroup's rows of queries or grad_out.
    auto start_scores = [&](auto dims, float (&c)[kQueries / 2], uint32_t a, uint32_t b) {
      attention::FenceMatrix();
#pragma unroll
      for (int k = 0; k < decltype(dims)::value / 16; ++k) {
        const int block = k / 4, step = k % 4 * 32;
        MatrixProduct<T, kQueries>::template Start<false, false>(
            c, MatrixDescriptor(a + block * S::kKeyBlockBytes + step, 0),
            MatrixDescriptor(b + block * kRowBlockBytes + group * kQueries * kRowBytes + step, 0),
            k > 0);
      }
      attention::CommitMatrix();
    };
    // Adds weights or gradients of scores times rows of grad_out or queries.
    auto start_gradient = [&](auto& c, uint32_t a, uint32_t b) {
      attention::FenceMatrix();
#pragma unroll
      for (int k = 0; k < kRowTile / 16; ++k) {
        c.template Start<T, false>(group, MatrixDescriptor(a + k * 32, 0), b + k * 16 * kRowBytes,
                                   kRowBlockBytes, true);
      }
      attention::CommitMatrix();
    };

    ZeroOtherKeys(shared);
    for (int n = 0; n < num_steps; ++n, ++steps) {
      const Turn<S::kStages> turn(steps);
      const Turn<S::kGradOutStages> grad_turn(steps);
      const uint32_t gradient_tile = shared.scores(turn.stage);
      const uint32_t weight_tile = gradient_tile + S::kKeyBlockBytes;
      const uint32_t grad_out = shared.grad_out(grad_turn.stage);
      float score[kQueries / 2], product[kQueries / 2];
      attention::WaitBarrier(shared.queries_full(turn.stage), turn.parity);
      const auto step = LoadShared<WideStep>(shared.step(turn.stage));
      ZeroOthers<kRowTile, S::kBlocks>(shared.queries(turn.stage), 0, step.num_rows);
      start_scores(std::integral_constant<int, kDims>(), score, shared.keys(),
                   shared.queries(turn.stage));
      attention::WaitBarrier(shared.grad_out_full(grad_turn.stage), grad_turn.parity);
      ZeroOthers<kRowTile, S::kValueBlocks>(grad_out, 0, step.num_rows);
      start_scores(std::integral_constant<int, kValueDims>(), product, shared.values(), grad_out);
      attention::WaitMatrix<1>();
      Pin(score);

      const WideScores<T, kQueries> scores(p, rows, step.first_query + group * kQueries,
                                           step.slope2);
      const uint32_t column = group * kQueries * 4 + lane % 4 * 8;  // of float32 by row
      typename WideScores<T, kQueries>::Fragments fragments;
      scores.Weigh(score, shared.lse2(turn.stage) + column, fragments);
      StoreFragments(weight_tile, warp_row, group * kQueries / 8, fragments);
      attention::WaitMatrix<0>();
      Pin(product);
      scores.Differentiate(score, product, shared.delta(grad_turn.stage) + column, fragments);
      StoreFragments(gradient_tile, warp_row, group * kQueries / 8, fragments);
      attention::FenceProxy();
      attention::SyncNamed(kScoresBarrier, kConsumerThreads);

      start_gradient(grad_v, weight_tile, grad_out);
      Columns grad_q;
      attention::FenceMatrix();
#pragma unroll
      for (int k = 0; k < S::kKeyTile / 16; ++k) {
        grad_q.template Start<T, true>(
            group, MatrixDescriptor(gradient_tile + k * 16 * kRowBytes, 0),
            shared.keys() + k * 16 * kRowBytes, S::kKeyBlockBytes, k > 0);
      }
      attention::CommitMatrix();
      start_gradient(grad_k, gradient_tile, shared.queries(turn.stage));
      attention::WaitMatrix<2>();
      grad_v.PinAll();
      attention::Release(shared.grad_out_empty(grad_turn.stage));
      attention::WaitMatrix<1>();
      grad_q.PinAll();
#pragma unroll
      for (int part = 0; part < S::kSumParts; ++part) {
        HandOverSums<kSumsEach>(shared, steps * S::kSumParts + part, group,
                                [&](int i) { return grad_q.Vector(part * kSumsEach / 4 + i); });
      }
      attention::WaitMatrix<0>();
      grad_k.PinAll();
      attention::Release(shared.queries_empty(turn.stage));
    }
    const auto item = LoadShared<WideItem>(shared.item());
    attention::Release(shared.keys_empty());
    grad_k.template Store<T>(p.grad_k, item, p.head_size, row, group, p.softmax_scale);
    grad_v.template Store<T>(p.grad_v, item, p.v_head_size, row, group, 1.f);
  }
}

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention_backward

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_WIDE_BY_COLUMNS_CUH_
