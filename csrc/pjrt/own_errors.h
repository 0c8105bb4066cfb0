// Errors of the adapter itself. Those that a caller gets from the table's functions are the
// plugin's otherwise, so the functions that read an error see whose it is.
#ifndef FLASHXLA_CSRC_PJRT_OWN_ERRORS_H_
#define FLASHXLA_CSRC_PJRT_OWN_ERRORS_H_

#include <string>

#include "pjrt/pjrt_abi.h"

namespace flashxla::pjrt {

// An error with the code UNIMPLEMENTED, for the caller to destroy.
Error* Unimplemented(std::string message);

Error* ErrorDestroy(void* caller);
Error* ErrorMessage(void* caller);
Error* ErrorGetCode(void* caller);
Error* ErrorForEachPayload(void* caller);

}  // namespace flashxla::pjrt

#endif  // FLASHXLA_CSRC_PJRT_OWN_ERRORS_H_
