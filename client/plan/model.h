// SPDX-License-Identifier: Apache-2.0
// The parts of a language model's shape that its loss head depends on, and the number of its parameters, from
// the config.json that Hugging Face keeps beside a model. Plain data and pure functions; thread-safe.
#ifndef LOSSD_CLIENT_PLAN_MODEL_H_
#define LOSSD_CLIENT_PLAN_MODEL_H_

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace lossd::plan {

// The first of the names that the object has with a value other than null: a whole number >= 1, or 0 if it
// has none of them. INVALID_ARGUMENT naming the field.
absl::StatusOr<int64_t> ConfigNumber(const nlohmann::json& config, std::initializer_list<const char*> names);

// The number of parameters of the whole model that are trained, embedding and head included: exactly what
// `transformers` makes of the configuration. Masks and other constants that some files hold beside the
// parameters are not counted. A tied classifier counts once. 0: not known, because the model_type is none of
// CountedModelTypes(), a size is missing, or an option is set of which nothing is known here.
// INVALID_ARGUMENT naming a size that is no whole number >= 1, or "parameters" if there are more than 2^50.
absl::StatusOr<int64_t> CountParameters(const nlohmann::json& config, bool tied);

// "gemma, gemma2, ...": for people.
std::string CountedModelTypes();

// What tie_word_embeddings is where a configuration of this model_type does not say. False for other types.
bool TiedByDefault(absl::string_view model_type);

// The shape of one language model.
struct Model {
  std::string name;        // for people; may be empty
  int64_t hidden = 0;      // D
  int64_t vocab = 0;       // V
  int64_t layers = 0;      // 0: not known
  bool tied = false;       // the classifier is the embedding
  int64_t parameters = 0;  // of the whole model, a tied classifier once; 0: not known
};

// INVALID_ARGUMENT naming "hidden" or "vocab" if a head cannot have it.
absl::Status Validate(const Model& model);

// hidden_size (n_embd, d_model), vocab_size, num_hidden_layers (n_layer, num_layers) and tie_word_embeddings
// (by default as the model_type has it), of the document or of its text_config; parameters as
// CountParameters counts them, of a document without text_config. INVALID_ARGUMENT naming the field.
absl::StatusOr<Model> ParseModel(absl::string_view config_json);

// From a config.json, or the folder it is in. NOT_FOUND if there is none.
absl::StatusOr<Model> ReadModel(const std::string& path);

}  // namespace lossd::plan

#endif  // LOSSD_CLIENT_PLAN_MODEL_H_
