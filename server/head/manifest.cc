#include "server/head/manifest.h"

#include <nlohmann/json.hpp>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "server/head/checksum.h"

namespace lossd::head {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kFormat[] = "lossd checkpoint";
constexpr int kVersion = 1;
constexpr char kChecksumKey[] = "checksum";

constexpr kernels::Norm kNorms[] = {kernels::Norm::kNone, kernels::Norm::kLayerNorm, kernels::Norm::kRmsNorm};
constexpr kernels::OptimizerState kStates[] = {
    kernels::OptimizerState::kNone, kernels::OptimizerState::kMomentum, kernels::OptimizerState::kAdam};
constexpr kernels::DType kDTypes[] = {kernels::DType::kFloat32, kernels::DType::kFloat16,
                                      kernels::DType::kBFloat16};

// The value out of `values` with this name; false if there is none.
template <typename Enum>
bool FromName(absl::Span<const Enum> values, const std::string& name, Enum* result) {
  for (const Enum value : values) {
    if (Name(value) != name) continue;
    *result = value;
    return true;
  }
  return false;
}

std::string DigestOf(const Json& json) {
  const std::string text = json.dump();
  Checksum checksum;
  checksum.Update(absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(text.data()), text.size()));
  return checksum.Digest();
}

Json EncodeSubject(const CheckpointSubject& subject) {
  const kernels::HeadConfig& config = subject.config;
  return {{"name", subject.head},
          {"hidden_size", config.hidden_size},
          {"vocab_size", config.vocab_size},
          {"bias", config.has_bias},
          {"class_weights", config.has_class_weights},
          {"norm", std::string(Name(config.norm))},
          {"norm_epsilon", config.norm_epsilon},
          {"compute_dtype", std::string(Name(config.compute_dtype))},
          {"optimizer_state", std::string(Name(config.optimizer_state))},
          {"trainable", config.trainable}};
}

// Throws Json::exception for a missing key or a value of another type; false for a value out of range.
bool DecodeSubject(const Json& json, CheckpointSubject* subject) {
  const Json& head = json.at("head");
  kernels::HeadConfig& config = subject->config;
  subject->head = head.at("name").get<std::string>();
  config.hidden_size = head.at("hidden_size").get<int64_t>();
  config.vocab_size = head.at("vocab_size").get<int64_t>();
  config.has_bias = head.at("bias").get<bool>();
  config.has_class_weights = head.at("class_weights").get<bool>();
  config.norm_epsilon = head.at("norm_epsilon").get<float>();
  config.trainable = head.at("trainable").get<bool>();
  subject->step = json.at("step").get<uint64_t>();
  subject->updates = json.contains("updates") ? json.at("updates").get<uint64_t>() : subject->step;
  if (subject->updates > subject->step) return false;
  return absl::SimpleHexAtoi(json.at("incarnation").get<std::string>(), &subject->incarnation) &&
         FromName<kernels::Norm>(kNorms, head.at("norm").get<std::string>(), &config.norm) &&
         FromName<kernels::DType>(kDTypes, head.at("compute_dtype").get<std::string>(),
                                  &config.compute_dtype) &&
         FromName<kernels::OptimizerState>(kStates, head.at("optimizer_state").get<std::string>(),
                                           &config.optimizer_state) &&
         kernels::Validate(config).ok();
}

// As DecodeSubject.
bool DecodeContent(const Json& json, Manifest* manifest) {
  manifest->file = json.at("file").get<std::string>();
  manifest->file_bytes = json.at("file_bytes").get<int64_t>();
  for (const Json& tensor : json.at("tensors")) {
    manifest->tensors.push_back({tensor.at("name").get<std::string>(), tensor.at("bytes").get<int64_t>(),
                                 tensor.at("xxh3_64").get<std::string>()});
  }
  return DecodeSubject(json, &manifest->subject);
}

}  // namespace

std::string EncodeManifest(const Manifest& manifest) {
  const CheckpointSubject& subject = manifest.subject;
  Json tensors = Json::array();
  for (const ManifestTensor& tensor : manifest.tensors) {
    tensors.push_back({{"name", tensor.name}, {"bytes", tensor.bytes}, {"xxh3_64", tensor.checksum}});
  }
  Json json = {{"format", kFormat},
               {"version", kVersion},
               {"head", EncodeSubject(subject)},
               {"step", subject.step},
               {"updates", subject.updates},
               {"incarnation", absl::StrCat(absl::Hex(subject.incarnation, absl::kZeroPad16))},
               {"file", manifest.file},
               {"file_bytes", manifest.file_bytes},
               {"tensors", std::move(tensors)}};
  json[kChecksumKey] = DigestOf(json);
  return json.dump(2) + "\n";
}

absl::StatusOr<Manifest> DecodeManifest(absl::string_view text) {
  Json json = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || json.value("format", Json()) != Json(kFormat)) {
    return absl::DataLossError("the manifest is no manifest of a checkpoint");
  }
  if (json.value("version", Json()) != Json(kVersion)) {
    return absl::FailedPreconditionError(
        absl::StrCat("the manifest has version ", json.value("version", Json()).dump(), ", not ", kVersion));
  }
  const Json checksum = json.value(kChecksumKey, Json());
  json.erase(kChecksumKey);
  if (checksum != Json(DigestOf(json))) return absl::DataLossError("the manifest's checksum does not match");
  Manifest manifest;
  try {
    if (!DecodeContent(json, &manifest)) return absl::DataLossError("the manifest has a value out of range");
  } catch (const Json::exception& error) {
    return absl::DataLossError(absl::StrCat("the manifest is incomplete: ", error.what()));
  }
  return manifest;
}

}  // namespace lossd::head
