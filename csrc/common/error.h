// The last error message of a thread.
#ifndef FLASHXLA_CSRC_COMMON_ERROR_H_
#define FLASHXLA_CSRC_COMMON_ERROR_H_

#include <exception>
#include <new>

#include "flashxla/common.h"

namespace flashxla {

// Stores a printf-formatted message for flashxla_last_error() and returns `status`.
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
flashxla_status SetError(flashxla_status status, const char* format, ...);

// Runs the body of a C ABI function and turns exceptions into an error: none may leave the library.
template <typename Body>
flashxla_status Guarded(const char* op, Body&& body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return SetError(FLASHXLA_OUT_OF_MEMORY, "%s: out of memory", op);
  } catch (const std::exception& error) {
    return SetError(FLASHXLA_INTERNAL, "%s: %s", op, error.what());
  }
}

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_COMMON_ERROR_H_
