// What all rows of a q tile of wide have in common. One warp finds it for all, while the queries
// are on their way.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_RULE_CUH_
#define FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_RULE_CUH_

#include "cuda/attention/problem.cuh"

namespace flashxla::attention {

struct TileRule {
  // How products become scores, in log2: times `scale`, after the softcap and ALiBi's slope.
  float scale, softcap, slope;
  int32_t negative;  // then it is the queries that are negated
  float value_scale;
  // What the tile's first query would see without the sequence's own first and last key; that of
  // each query after it begins and ends one further.
  KeyRange first;
  KeyRange all;        // the sequence's
  int32_t last_query;  // of the sequence, counted from the tile's first one

  __device__ static TileRule Of(const Problem& p, const ManyTile& tile) {
    const float product_scale = p.ScoreScale(tile.index, tile.kv_head);
    constexpr float kLeast = 1e-30f;  // 0 times the -inf of a masked score is NaN
    TileRule rule;
    rule.negative = product_scale < 0.f;
    rule.scale = fabsf(product_scale), rule.softcap = 0.f;
    if (p.softcap > 0.f) {  // neither may its factor be 0, which says that there is none
      rule.softcap = fmaxf(2.f * kLog2e * rule.scale / p.softcap, kLeast), rule.scale = p.softcap;
    }
    rule.scale = fmaxf(rule.scale * kLog2e, kLeast);
    rule.slope = p.alibi_slopes.at(tile.index, tile.head, 0.f) * kLog2e;
    rule.value_scale = p.ValueScale(tile.index, tile.kv_head);

    constexpr int kFarBefore = -(1 << 20);  // whichever of the tile's queries: before the first key
    const Sequence& s = tile.s;
    const int64_t position = int64_t{tile.first_query} + s.length - s.num_queries;
    auto place = [&](int64_t key) {
      if (key < kFarBefore) return kFarBefore;
      return key < s.num_keys ? static_cast<int32_t>(key) : s.num_keys;
    };
    const Window& window = p.window;
    rule.first.begin = window.left >= 0 ? place(position - window.left) : kFarBefore;
    rule.first.end = window.right >= 0 ? place(position + window.right + 1) : s.num_keys;
    rule.all = {s.first_key, s.num_keys};
    rule.last_query = s.num_queries - 1 - tile.first_query;
    return rule;
  }

  // As Problem::Visible, of the tile's query number `query`. Those past the sequence's last see
  // what that sees.
  __device__ KeyRange Visible(int query) const {
    const int after = min(query, last_query);
    return {min(max(first.begin + after, all.begin), all.end),
            max(min(first.end + after, all.end), 0)};
  }

  // What the scores that OnlineSoftmax leaves are still to be multiplied by.
  template <bool kAlibi>
  __device__ float rest() const {
    return kAlibi && slope != 0.f ? 1.f : scale;
  }
};

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_WIDE_RULE_CUH_
