// Heads above 128: the gradients of 64 keys take the registers of both consumer warpgroups. Each
// has half of their columns, and computes the scores of half of the queries; weights and the
// gradients of the scores go through shared memory.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_WIDE_BY_COLUMNS_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_WIDE_BY_COLUMNS_CUH_

#include "cuda/attention_backward/wide_consumer.cuh"

namespace flashxla::attention_backward {

#if defined(FLASHXLA_HOPPER)

template <typename T, int kDims>
__device__ void ConsumeByColumns(const WideProblem& w, const WideShared<kDims>& shared) {
  using S = WideShape<kDims>;
  const Problem& p = w.p;
  const int lane = threadIdx.x & 31, group = ConsumerGroup();
  constexpr int kQueries = kRowTile / 2;  // whose scores a warpgroup computes
  constexpr int kColumns = kDims / 2;     // of gradients
  constexpr int kSumsEach = kColumns / 2 / S::kSumParts;
  static_assert(S::kKeyTile == 64);
  const int warp_row = threadIdx.x % kWarpgroupThreads / 32 * 16, row = warp_row + lane / 4;
  // Where this warpgroup's columns start, in rows of keys and in rows of queries.
  const uint32_t key_columns = group * kColumns / kBlockColumns * S::kKeyBlockBytes;
  const uint32_t row_columns = group * kColumns / kBlockColumns * kRowBlockBytes;
  uint32_t steps = 0;

  for (uint32_t items = 0;; ++items) {
    attention::WaitBarrier(shared.keys_full(), items % 2);
    const int num_steps = StepsOfItem(shared);
    if (num_steps < 0) return;
    const KeyRows rows(p, LoadShared<WideItem>(shared.item()), 0, row);
    float grad_k[kColumns / 2], grad_v[kColumns / 2];
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) grad_k[i] = grad_v[i] = 0.f;

    // c = keys or values times this warpgroup's rows of queries or grad_out.
    auto start_scores = [&](float (&c)[kQueries / 2], uint32_t a, uint32_t b) {
      attention::FenceMatrix();
#pragma unroll
      for (int k = 0; k < kDims / 16; ++k) {
        const int block = k / 4, step = k % 4 * 32;
        SharedProduct<T, kQueries>::template Start<false, false>(
            c, MatrixDescriptor(a + block * S::kKeyBlockBytes + step, 0),
            MatrixDescriptor(b + block * kRowBlockBytes + group * kQueries * kRowBytes + step, 0),
            k > 0);
      }
      attention::CommitMatrix();
    };
    // Adds weights or gradients of scores times rows of grad_out or queries.
    auto start_gradient = [&](float (&c)[kColumns / 2], uint32_t a, uint32_t b) {
      attention::FenceMatrix();
#pragma unroll
      for (int k = 0; k < kRowTile / 16; ++k) {
        SharedProduct<T, kColumns>::template Start<false, true>(
            c, MatrixDescriptor(a + k * 32, 0),
            MatrixDescriptor(b + row_columns + k * 16 * kRowBytes, kRowBlockBytes), true);
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
      const int2 step = LoadShared2(shared.step(turn.stage));  // a WideStep
      ZeroOthers<kRowTile, S::kBlocks>(shared.queries(turn.stage), 0, step.y);
      start_scores(score, shared.keys(), shared.queries(turn.stage));
      attention::WaitBarrier(shared.grad_out_full(grad_turn.stage), grad_turn.parity);
      ZeroOthers<kRowTile, S::kBlocks>(grad_out, 0, step.y);
      start_scores(product, shared.values(), grad_out);
      attention::WaitMatrix<1>();
      Pin(score);

      const WideScores<T, kQueries> scores(p, rows, step.x + group * kQueries);
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
      float grad_q[kColumns / 2];
      attention::FenceMatrix();
#pragma unroll
      for (int k = 0; k < S::kKeyTile / 16; ++k) {
        SharedProduct<T, kColumns>::template Start<true, true>(
            grad_q, MatrixDescriptor(gradient_tile + k * 16 * kRowBytes, 0),
            MatrixDescriptor(shared.keys() + key_columns + k * 16 * kRowBytes, S::kKeyBlockBytes),
            k > 0);
      }
      attention::CommitMatrix();
      start_gradient(grad_k, gradient_tile, shared.queries(turn.stage));
      attention::WaitMatrix<2>();
      Pin(grad_v);
      Release(shared.grad_out_empty(grad_turn.stage));
      attention::WaitMatrix<1>();
      Pin(grad_q);
#pragma unroll
      for (int part = 0; part < S::kSumParts; ++part) {
        HandOverSums<kSumsEach>(shared, steps * S::kSumParts + part, group,
                                grad_q + part * kSumsEach);
      }
      attention::WaitMatrix<0>();
      Pin(grad_k);
      Release(shared.queries_empty(turn.stage));
    }
    const auto item = LoadShared<WideItem>(shared.item());
    Release(shared.keys_empty());
    const int column = group * kColumns;
    StoreKeys<T, kColumns>(p.grad_k, item, p.head_size, row, column, p.softmax_scale, grad_k);
    StoreKeys<T, kColumns>(p.grad_v, item, p.head_size, row, column, 1.f, grad_v);
  }
}

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention_backward

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_WIDE_BY_COLUMNS_CUH_
