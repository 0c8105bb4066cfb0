#include "common/error.h"

#include <cstdarg>
#include <cstdio>

namespace flashxla {
namespace {

// A fixed buffer: reporting an allocation failure must not allocate.
thread_local char last_error[512] = "";

}  // namespace

flashxla_status SetError(flashxla_status status, const char* format, ...) {
  va_list args;
  va_start(args, format);
  std::vsnprintf(last_error, sizeof(last_error), format, args);
  va_end(args);
  return status;
}

}  // namespace flashxla

const char* flashxla_last_error(void) { return flashxla::last_error; }
