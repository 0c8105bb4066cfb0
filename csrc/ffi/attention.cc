#include "flashxla/attention.h"

#include "ffi/platform.h"

namespace flashxla {
namespace {

struct Attention {
  using Args = flashxla_attention_args;
  static constexpr std::array kInputs = {
      TensorField<Args>{"q", &Args::q},
      TensorField<Args>{"k", &Args::k},
      TensorField<Args>{"v", &Args::v},
      TensorField<Args>{"cu_seqlens_q", &Args::cu_seqlens_q},
      TensorField<Args>{"cu_seqlens_k", &Args::cu_seqlens_k},
      TensorField<Args>{"seqused_k", &Args::seqused_k},
      TensorField<Args>{"leftpad_k", &Args::leftpad_k},
      TensorField<Args>{"block_table", &Args::block_table},
      TensorField<Args>{"num_seqs", &Args::num_seqs},
      TensorField<Args>{"alibi_slopes", &Args::alibi_slopes},
      TensorField<Args>{"sinks", &Args::sinks},
      TensorField<Args>{"q_descale", &Args::q_descale},
      TensorField<Args>{"k_descale", &Args::k_descale},
      TensorField<Args>{"v_descale", &Args::v_descale},
      TensorField<Args>{"plan", &Args::plan},
  };
  static constexpr std::array kResults = {
      TensorField<Args>{"out", &Args::out},
      TensorField<Args>{"lse", &Args::lse},
      TensorField<Args>{"workspace", &Args::workspace},
  };
  static constexpr std::array kIntegers = {
      ScalarField<Args, int64_t>{"layout", &Args::layout},
      ScalarField<Args, int64_t>{"kv_dtype", &Args::kv_dtype},
      ScalarField<Args, int64_t>{"causal", &Args::causal},
      ScalarField<Args, int64_t>{"window_left", &Args::window_left},
      ScalarField<Args, int64_t>{"window_right", &Args::window_right},
      ScalarField<Args, int64_t>{"max_seqlen_q", &Args::max_seqlen_q},
      ScalarField<Args, int64_t>{"max_seqlen_k", &Args::max_seqlen_k},
      ScalarField<Args, int64_t>{"engines", &Args::engines},
  };
  static constexpr std::array kFloats = {
      ScalarField<Args, double>{"softmax_scale", &Args::softmax_scale},
      ScalarField<Args, double>{"softcap", &Args::softcap},
  };
};

ffi::Error Handle(PlatformArgument platform, ffi::RemainingArgs operands,
                  ffi::RemainingRets results, ffi::Dictionary attrs) {
  return Execute<Attention>(FLASHXLA_FUNCTION(attention), platform, operands, results, attrs);
}

}  // namespace
}  // namespace flashxla

FLASHXLA_DEFINE_HANDLER(flashxla_ffi_attention)
