// SPDX-License-Identifier: Apache-2.0
// Sizes in a model's config.json. Pure function; thread-safe.
#ifndef LOSSD_CLIENT_PLAN_CONFIG_NUMBER_H_
#define LOSSD_CLIENT_PLAN_CONFIG_NUMBER_H_

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json_fwd.hpp>

#include "absl/status/statusor.h"

namespace lossd::plan {

// The first of the names that the object has with a value other than null: a whole number >= 1, or 0 if it
// has none of them. INVALID_ARGUMENT naming the field.
absl::StatusOr<int64_t> ConfigNumber(const nlohmann::json& config, std::initializer_list<const char*> names);

}  // namespace lossd::plan

#endif  // LOSSD_CLIENT_PLAN_CONFIG_NUMBER_H_
