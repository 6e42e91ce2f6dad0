// SPDX-License-Identifier: Apache-2.0
#include "client/plan/model.h"

#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "client/plan/config_number.h"
#include "client/plan/parameters.h"
#include "kernels/errors/field_error.h"
#include "kernels/head_config.h"

namespace lossd::plan {
namespace {

using Json = nlohmann::json;

// Larger files are no model's configuration.
constexpr std::streamsize kMostConfigBytes = 4 << 20;

absl::StatusOr<int64_t> RequiredNumber(const Json& config, std::initializer_list<const char*> names) {
  absl::StatusOr<int64_t> number = ConfigNumber(config, names);
  if (number.ok() && *number == 0) {
    return absl::InvalidArgumentError(absl::StrCat("the model's configuration has no ", *names.begin()));
  }
  return number;
}

}  // namespace

absl::Status Validate(const Model& model) {
  constexpr int64_t kMostHidden = int64_t{1} << 24, kMostVocab = (int64_t{1} << 31) - 1;
  if (model.hidden < 1 || model.hidden > kMostHidden) {
    return errors::FieldError("hidden", absl::StrCat("be from 1 to ", kMostHidden), model.hidden);
  }
  if (model.vocab < 1 || model.vocab > kMostVocab) {
    return errors::FieldError("vocab", absl::StrCat("be from 1 to ", kMostVocab), model.vocab);
  }
  return absl::OkStatus();
}

absl::StatusOr<Model> ParseModel(absl::string_view config_json) {
  Json config = Json::parse(config_json.begin(), config_json.end(), nullptr, /*allow_exceptions=*/false);
  if (!config.is_object())
    return absl::InvalidArgumentError("the model's configuration is not a JSON object");
  Model model;
  if (const auto type = config.find("model_type"); type != config.end() && type->is_string()) {
    model.name = type->get<std::string>();
  }
  const auto tied = config.find("tie_word_embeddings");
  model.tied = tied != config.end() && tied->is_boolean() ? tied->get<bool>() : TiedByDefault(model.name);
  bool has_other_parts = false;  // for images or sound, beside text
  if (const auto text = config.find("text_config"); text != config.end() && text->is_object()) {
    const Json inner = *text;
    config = inner;
    has_other_parts = true;
  }
  const absl::StatusOr<int64_t> hidden = RequiredNumber(config, {"hidden_size", "n_embd", "d_model"});
  if (!hidden.ok()) return hidden.status();
  const absl::StatusOr<int64_t> vocab = RequiredNumber(config, {"vocab_size"});
  if (!vocab.ok()) return vocab.status();
  const absl::StatusOr<int64_t> layers = ConfigNumber(config, {"num_hidden_layers", "n_layer", "num_layers"});
  if (!layers.ok()) return layers.status();
  model.hidden = *hidden;
  model.vocab = *vocab;
  model.layers = *layers;
  if (absl::Status status = Validate(model); !status.ok()) return status;
  if (has_other_parts) return model;
  const absl::StatusOr<int64_t> parameters = CountParameters(config, model.tied);
  if (!parameters.ok()) return parameters.status();
  model.parameters = *parameters;
  return model;
}

absl::StatusOr<Model> ReadModel(const std::string& path) {
  std::error_code error;
  std::filesystem::path file = path;
  if (std::filesystem::is_directory(file, error)) file /= "config.json";
  std::ifstream in(file, std::ios::binary);
  if (!in || !std::filesystem::is_regular_file(file, error)) {
    return absl::NotFoundError(absl::StrCat("no model's configuration at \"", file.string(), "\""));
  }
  std::string text;
  text.resize(kMostConfigBytes);
  in.read(text.data(), kMostConfigBytes);
  text.resize(static_cast<size_t>(in.gcount()));
  absl::StatusOr<Model> model = ParseModel(text);
  if (!model.ok()) {
    return absl::Status(model.status().code(), absl::StrCat(file.string(), ": ", model.status().message()));
  }
  return model;
}

}  // namespace lossd::plan
