// Heads up to 128: the consumer warpgroups have 64 keys each. Scores and weights are [keys,
// queries], so that the weights are in registers where they are multiplied with grad_out and
// queries. For grad_q, the gradients of the scores go through shared memory: each warpgroup
// computes half of the columns, from the keys of both.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_WIDE_BY_KEYS_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_WIDE_BY_KEYS_CUH_

#include "cuda/attention_backward/wide_consumer.cuh"

namespace flashxla::attention_backward {

#if defined(FLASHXLA_HOPPER)

template <typename T, typename S>
__device__ void ConsumeByKeys(const WideProblem& w, const WideShared<S>& shared) {
  constexpr int kDims = S::kDims;
  static_assert(S::kValueDims == kDims);
  const Problem& p = w.p;
  const int lane = threadIdx.x & 31, group = ConsumerGroup();
  constexpr int kHalfColumns = kDims / 2;  // of grad_q
  const int warp_row = group * 64 + threadIdx.x % kWarpgroupThreads / 32 * 16;
  const int row = warp_row + lane / 4;
  uint32_t steps = 0;

  for (uint32_t items = 0;; ++items) {
    attention::WaitBarrier(shared.keys_full(), items % 2);
    const int num_steps = StepsOfItem(shared);
    if (num_steps < 0) return;
    const KeyRows rows(p, LoadShared<WideItem>(shared.item()), group * 64, row);
    float grad_k[kDims / 2], grad_v[kDims / 2];
#pragma unroll
    for (int i = 0; i < kDims / 2; ++i) grad_k[i] = grad_v[i] = 0.f;

    // c = this warpgroup's keys or values times rows of queries or grad_out.
    auto start_scores = [&](float (&c)[kRowTile / 2], uint32_t a, uint32_t b) {
      attention::FenceMatrix();
#pragma unroll
      for (int k = 0; k < kDims / 16; ++k) {
        const int block = k / 4, step = k % 4 * 32;
        MatrixProduct<T, kRowTile>::template Start<false, false>(
            c, MatrixDescriptor(a + block * S::kKeyBlockBytes + group * 64 * kRowBytes + step, 0),
            MatrixDescriptor(b + block * kRowBlockBytes + step, 0), k > 0);
      }
      attention::CommitMatrix();
    };
    // Adds weights or gradients of scores times rows of grad_out or queries.
    auto start_gradient = [&](float (&c)[kDims / 2], const uint32_t (&a)[kRowTile / 16][4],
                              uint32_t b) {
      attention::FenceMatrix();
#pragma unroll
      for (int k = 0; k < kRowTile / 16; ++k) {
        MatrixProduct<T, kDims>::template Start<true>(
            c, a[k], MatrixDescriptor(b + k * 16 * kRowBytes, kRowBlockBytes), true);
      }
      attention::CommitMatrix();
    };

    ZeroOtherKeys(shared);
    for (int n = 0; n < num_steps; ++n, ++steps) {
      const Turn<S::kStages> turn(steps);
      float score[kRowTile / 2], product[kRowTile / 2];
      attention::WaitBarrier(shared.queries_full(turn.stage), turn.parity);
      const auto step = LoadShared<WideStep>(shared.step(turn.stage));
      ZeroOthers<kRowTile, S::kBlocks>(shared.queries(turn.stage), 0, step.num_rows);
      start_scores(score, shared.keys(), shared.queries(turn.stage));
      attention::WaitBarrier(shared.grad_out_full(turn.stage), turn.parity);
      ZeroOthers<kRowTile, S::kBlocks>(shared.grad_out(turn.stage), 0, step.num_rows);
      start_scores(product, shared.values(), shared.grad_out(turn.stage));
      attention::WaitMatrix<1>();
      Pin(score);

      const WideScores<T, kRowTile> scores(p, rows, step.first_query, step.slope2);
      typename WideScores<T, kRowTile>::Fragments weights, gradients;
      scores.Weigh(score, shared.lse2(turn.stage) + lane % 4 * 8, weights);
      start_gradient(grad_v, weights, shared.grad_out(turn.stage));
      attention::WaitMatrix<1>();
      Pin(product);
      scores.Differentiate(score, product, shared.delta(turn.stage) + lane % 4 * 8, gradients);
      StoreFragments(shared.scores(turn.stage), warp_row, 0, gradients);
      attention::FenceProxy();
      attention::SyncNamed(kScoresBarrier, kConsumerThreads);

      float grad_q[kHalfColumns / 2];
      attention::FenceMatrix();
#pragma unroll
      for (int k = 0; k < S::kKeyTile / 16; ++k) {
        const uint32_t half = shared.keys() +
                              group * kHalfColumns / kBlockColumns * S::kKeyBlockBytes +
                              group * kHalfColumns % kBlockColumns * 2;
        MatrixProduct<T, kHalfColumns>::template Start<true, true>(
            grad_q, MatrixDescriptor(shared.scores(turn.stage) + k * 16 * kRowBytes, 0),
            MatrixDescriptor(half + k * 16 * kRowBytes, 0), k > 0);
      }
      attention::CommitMatrix();
      start_gradient(grad_k, gradients, shared.queries(turn.stage));
      attention::WaitMatrix<1>();
      Pin(grad_v);
      Pin(grad_q);
      attention::Release(shared.grad_out_empty(turn.stage));
      HandOverSums<kHalfColumns / 2>(shared, steps, group, [&](int i) {
        return make_float4(grad_q[4 * i], grad_q[4 * i + 1], grad_q[4 * i + 2], grad_q[4 * i + 3]);
      });
      attention::WaitMatrix<0>();
      Pin(grad_k);
      attention::Release(shared.queries_empty(turn.stage));
    }
    const auto item = LoadShared<WideItem>(shared.item());
    attention::Release(shared.keys_empty());
    StoreKeys<T, kDims>(p.grad_k, item, p.head_size, row, 0, p.softmax_scale, grad_k);
    StoreKeys<T, kDims>(p.grad_v, item, p.v_head_size, row, 0, 1.f, grad_v);
  }
}

#endif  // FLASHXLA_HOPPER

}  // namespace flashxla::attention_backward

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_BACKWARD_WIDE_BY_KEYS_CUH_
