// SPDX-License-Identifier: Apache-2.0
// The number of parameters of a whole language model, from the config.json that Hugging Face keeps beside it.
// Pure functions; thread-safe.
#ifndef LOSSD_CLIENT_PLAN_PARAMETERS_H_
#define LOSSD_CLIENT_PLAN_PARAMETERS_H_

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace lossd::plan {

// What is trained, embedding and head included: exactly what `transformers` makes of the configuration. Masks
// and other constants that some files hold beside the parameters are not counted. A tied classifier counts
// once. 0: not known, because the model_type is none of CountedModelTypes(), a size is missing, or an option
// is set of which nothing is known here. INVALID_ARGUMENT naming a size that is no whole number >= 1, or
// "parameters" if there are more than 2^50.
absl::StatusOr<int64_t> CountParameters(const nlohmann::json& config, bool tied);

// "gemma, gemma2, ...": for people.
std::string CountedModelTypes();

// What tie_word_embeddings is where a configuration of this model_type does not say. False for other types.
bool TiedByDefault(absl::string_view model_type);

}  // namespace lossd::plan

#endif  // LOSSD_CLIENT_PLAN_PARAMETERS_H_
