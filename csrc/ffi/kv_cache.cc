#include "flashxla/kv_cache.h"

#include "ffi/platform.h"

namespace flashxla {
namespace {

struct KvCache {
  using Args = flashxla_kv_cache_args;
  static constexpr std::array kInputs = {
      TensorField<Args>{"key", &Args::key},
      TensorField<Args>{"value", &Args::value},
      TensorField<Args>{"key_cache", &Args::key_cache},
      TensorField<Args>{"value_cache", &Args::value_cache},
      TensorField<Args>{"slot_mapping", &Args::slot_mapping},
      TensorField<Args>{"k_scale", &Args::k_scale},
      TensorField<Args>{"v_scale", &Args::v_scale},
  };
  static constexpr std::array kResults = {
      TensorField<Args>{"key_cache", &Args::key_cache},
      TensorField<Args>{"value_cache", &Args::value_cache},
  };
  static constexpr std::array kIntegers = {
      ScalarField<Args, int64_t>{"layout", &Args::layout},
      ScalarField<Args, int64_t>{"cache_dtype", &Args::cache_dtype},
  };
  static constexpr std::array<ScalarField<Args, double>, 0> kFloats{};
};

ffi::Error Handle(PlatformArgument platform, ffi::RemainingArgs operands,
                  ffi::RemainingRets results, ffi::Dictionary attrs) {
  return Execute<KvCache>(FLASHXLA_FUNCTION(kv_cache), platform, operands, results, attrs);
}

}  // namespace
}  // namespace flashxla

FLASHXLA_DEFINE_HANDLER(flashxla_ffi_kv_cache)
