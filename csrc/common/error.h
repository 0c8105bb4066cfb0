// The last error message of a thread.
#ifndef FLASHXLA_CSRC_COMMON_ERROR_H_
#define FLASHXLA_CSRC_COMMON_ERROR_H_

#include "flashxla/common.h"

namespace flashxla {

// Stores a printf-formatted message for flashxla_last_error() and returns `status`.
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
flashxla_status SetError(flashxla_status status, const char* format, ...);

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_COMMON_ERROR_H_
