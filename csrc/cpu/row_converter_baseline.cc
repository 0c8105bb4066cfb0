#include "cpu/row_converter_loops.h"

namespace flashxla {

RowConverter BaselineRowConverter(int64_t from, int64_t to) { return FindRowConverter(from, to); }

}  // namespace flashxla
