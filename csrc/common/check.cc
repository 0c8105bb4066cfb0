#include <cstdlib>
#include <string_view>

#include "flashxla/common.h"

int64_t flashxla_check_indices() {
  static const bool check = [] {
    const char* value = std::getenv("FLASHXLA_CHECK");
    return value != nullptr && std::string_view(value) == "1";
  }();
  return check;
}
