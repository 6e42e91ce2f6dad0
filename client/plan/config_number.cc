// SPDX-License-Identifier: Apache-2.0
#include "client/plan/config_number.h"

#include <nlohmann/json.hpp>

#include "kernels/errors/field_error.h"

namespace lossd::plan {

absl::StatusOr<int64_t> ConfigNumber(const nlohmann::json& config, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const auto it = config.find(name);
    if (it == config.end() || it->is_null()) continue;
    if (!it->is_number_integer() || it->get<int64_t>() < 1) {
      return errors::FieldError(name, "be a whole number >= 1", it->dump());
    }
    return it->get<int64_t>();
  }
  return 0;
}

}  // namespace lossd::plan
