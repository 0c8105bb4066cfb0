// The loaded plugin's own, unchanged function table.
#ifndef FLASHXLA_CSRC_PJRT_PLUGIN_H_
#define FLASHXLA_CSRC_PJRT_PLUGIN_H_

#include "pjrt/pjrt_abi.h"

namespace flashxla::pjrt {

// Null before a plugin is loaded.
const Api* Plugin();

inline Function* const* Functions(const Api* api) {
  return reinterpret_cast<Function* const*>(api + 1);
}

// A function of the plugin.
inline Function* Original(FunctionIndex index) { return Functions(Plugin())[index]; }

}  // namespace flashxla::pjrt

#endif  // FLASHXLA_CSRC_PJRT_PLUGIN_H_
