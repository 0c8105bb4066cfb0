#if defined(FLASHXLA_X86)

#include "cpu/row_converter_loops.h"

namespace flashxla {

RowConverter Avx512RowConverter(int64_t from, int64_t to) { return FindRowConverter(from, to); }

}  // namespace flashxla

#endif  // FLASHXLA_X86
