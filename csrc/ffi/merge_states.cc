#include "flashxla/merge_states.h"

#include "ffi/platform.h"

namespace flashxla {
namespace {

struct MergeStates {
  using Args = flashxla_merge_states_args;
  static constexpr std::array kInputs = {
      TensorField<Args>{"out_a", &Args::out_a},
      TensorField<Args>{"lse_a", &Args::lse_a},
      TensorField<Args>{"out_b", &Args::out_b},
      TensorField<Args>{"lse_b", &Args::lse_b},
  };
  static constexpr std::array kResults = {
      TensorField<Args>{"out", &Args::out},
      TensorField<Args>{"lse", &Args::lse},
  };
  static constexpr std::array<ScalarField<Args, int64_t>, 0> kIntegers{};
  static constexpr std::array<ScalarField<Args, double>, 0> kFloats{};
};

ffi::Error Handle(PlatformArgument platform, ffi::RemainingArgs operands,
                  ffi::RemainingRets results, ffi::Dictionary attrs) {
  return Execute<MergeStates>(FLASHXLA_FUNCTION(merge_states), platform, operands, results, attrs);
}

}  // namespace
}  // namespace flashxla

FLASHXLA_DEFINE_HANDLER(flashxla_ffi_merge_states)
