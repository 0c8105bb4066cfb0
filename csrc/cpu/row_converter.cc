#include "cpu/row_converter.h"

#include "cpu/isa.h"

namespace flashxla {

RowConverter GetRowConverter(int64_t from, int64_t to) {
#if defined(FLASHXLA_X86)
  switch (GetIsa()) {
    case Isa::kAvx512Bf16:
    case Isa::kAvx512:
      return Avx512RowConverter(from, to);
    case Isa::kAvx2:
      return Avx2RowConverter(from, to);
    case Isa::kBaseline:
      break;
  }
#endif
  return BaselineRowConverter(from, to);
}

}  // namespace flashxla
