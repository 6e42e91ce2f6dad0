// SPDX-License-Identifier: Apache-2.0
// The shape of a language model as far as its loss head goes, and the number of its parameters, from the
// config.json that Hugging Face keeps beside a model. Plain data and pure functions; thread-safe.
#ifndef LOSSD_CLIENT_PLAN_MODEL_H_
#define LOSSD_CLIENT_PLAN_MODEL_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace lossd::plan {

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
// (by default as the model_type has it), of the document or of its text_config; parameters as far as
// parameters.h counts them, of a document without text_config. INVALID_ARGUMENT naming the field.
absl::StatusOr<Model> ParseModel(absl::string_view config_json);

// From a config.json, or the folder it is in. NOT_FOUND if there is none.
absl::StatusOr<Model> ReadModel(const std::string& path);

}  // namespace lossd::plan

#endif  // LOSSD_CLIENT_PLAN_MODEL_H_
