#include "common/slot_mapping.h"

#include <cinttypes>

#include "common/error.h"

namespace flashxla {

flashxla_status CheckSlots(const SlotMapping& slots, int64_t num_slots) {
  for (int64_t t = 0; t < slots.size; ++t) {
    if (slots[t] >= num_slots) {
      return SetError(FLASHXLA_INVALID_ARGUMENT,
                      "slot_mapping[%" PRId64 "] = %" PRId64 ": outside [0, %" PRId64
                      ") (negative is padding)",
                      t, slots[t], num_slots);
    }
  }
  return FLASHXLA_OK;
}

}  // namespace flashxla
