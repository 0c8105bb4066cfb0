// The plan of attention on a GPU as an operation of its own, so that XLA's common subexpression
// elimination gives the layers of a model one plan.
#ifdef FLASHXLA_PLATFORM_CUDA

#include "ffi/platform.h"
#include "flashxla/attention.h"

namespace flashxla {
namespace {

struct AttentionPlan {
  using Args = flashxla_attention_plan_args;
  static constexpr std::array kInputs = {
      TensorField<Args>{"cu_seqlens_q", &Args::cu_seqlens_q},
      TensorField<Args>{"cu_seqlens_k", &Args::cu_seqlens_k},
      TensorField<Args>{"seqused_k", &Args::seqused_k},
      TensorField<Args>{"leftpad_k", &Args::leftpad_k},
      TensorField<Args>{"block_table", &Args::block_table},
      TensorField<Args>{"num_seqs", &Args::num_seqs},
  };
  static constexpr std::array kResults = {
      TensorField<Args>{"plan", &Args::plan},
  };
  static constexpr std::array kIntegers = {
      ScalarField<Args, int64_t>{"engines", &Args::engines},
      ScalarField<Args, int64_t>{"num_tokens", &Args::num_tokens},
      ScalarField<Args, int64_t>{"num_heads", &Args::num_heads},
      ScalarField<Args, int64_t>{"num_kv_heads", &Args::num_kv_heads},
      ScalarField<Args, int64_t>{"num_blocks", &Args::num_blocks},
      ScalarField<Args, int64_t>{"block_size", &Args::block_size},
      ScalarField<Args, int64_t>{"causal", &Args::causal},
      ScalarField<Args, int64_t>{"window_left", &Args::window_left},
      ScalarField<Args, int64_t>{"window_right", &Args::window_right},
  };
  static constexpr std::array<ScalarField<Args, double>, 0> kFloats{};
};

ffi::Error Handle(PlatformArgument platform, ffi::RemainingArgs operands,
                  ffi::RemainingRets results, ffi::Dictionary attrs) {
  return Execute<AttentionPlan>(FLASHXLA_FUNCTION(attention_plan), platform, operands, results,
                                attrs);
}

}  // namespace
}  // namespace flashxla

FLASHXLA_DEFINE_HANDLER(flashxla_ffi_attention_plan)

#endif  // FLASHXLA_PLATFORM_CUDA
