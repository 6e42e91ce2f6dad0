// SPDX-License-Identifier: Apache-2.0
// The division of a head into shards, and the manifest as JSON (manifest.h).
#include "server/head/manifest.h"

#include <xxhash.h>

#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"
#include "proto/tensorfile/safetensors.h"
#include "server/head/disk.h"

namespace lossd::head {
namespace {

bool HasRowPerClass(kernels::Param param) {
  return param == kernels::Param::kWeight || param == kernels::Param::kBias ||
         param == kernels::Param::kClassWeights;
}

int64_t DividedUp(int64_t value, int64_t by) { return (value + by - 1) / by; }

}  // namespace

std::vector<kernels::TensorId> CheckpointTensors(const kernels::HeadConfig& config) {
  std::vector<kernels::TensorId> ids;
  for (const kernels::Param param : kernels::kAllParams) {
    for (const kernels::Role role :
         {kernels::Role::kValue, kernels::Role::kMoment1, kernels::Role::kMoment2}) {
      if (kernels::HasTensor(config, {param, role})) ids.push_back({param, role});
    }
  }
  return ids;
}

int64_t CheckpointBytes(const kernels::HeadConfig& config) {
  int64_t bytes = 0;
  for (const kernels::TensorId id : CheckpointTensors(config)) {
    bytes += Bytes(kernels::ShapeOf(config, id.param));
  }
  return bytes;
}

std::string ClassRange::Text() const { return absl::StrCat("classes [", begin, ", ", end, ")"); }

std::vector<ClassRange> DivideClasses(const kernels::HeadConfig& config, const ShardRules& rules) {
  return DivideClasses(config, {0, config.vocab_size}, rules, kMostShards);
}

std::vector<ClassRange> DivideClasses(const kernels::HeadConfig& config, const ClassRange& classes,
                                      const ShardRules& rules, size_t most) {
  int64_t bytes = 0;
  for (const TensorPart& part : PartsOf(config, classes)) {
    bytes += Bytes({part.rows, kernels::ShapeOf(config, part.id.param).cols});
  }
  const int64_t threads = std::max(rules.threads, 1);
  int64_t shards = DividedUp(bytes, std::max<int64_t>(rules.most_bytes, 1));
  shards = std::max(shards, std::min(threads, bytes / kLeastShardBytes));
  if (shards > threads) shards = DividedUp(shards, threads) * threads;
  shards = std::clamp<int64_t>(shards, 1, std::min<int64_t>(classes.size(), static_cast<int64_t>(most)));
  std::vector<ClassRange> ranges;
  const int64_t least = classes.size() / shards;
  const int64_t larger = classes.size() % shards;  // number of ranges that have one more class
  int64_t begin = classes.begin;
  for (int64_t shard = 0; shard < shards; ++shard) {
    const int64_t end = begin + least + (shard < larger ? 1 : 0);
    ranges.push_back({begin, end});
    begin = end;
  }
  return ranges;
}

std::vector<TensorPart> PartsOf(const kernels::HeadConfig& config, const ClassRange& classes) {
  std::vector<TensorPart> parts;
  for (const kernels::TensorId id : CheckpointTensors(config)) {
    if (HasRowPerClass(id.param)) {
      parts.push_back({id, classes.begin, classes.size()});
    } else if (classes.begin == 0) {
      parts.push_back({id, 0, kernels::ShapeOf(config, id.param).rows});
    }
  }
  return parts;
}

std::string ShardFile(size_t shard, size_t shards) {
  if (shards == 1) return kTensorFile;
  return absl::StrFormat("tensors-%05d-of-%05d.safetensors", shard + 1, shards);
}

std::map<std::string, std::string> ShardMetadata(const kernels::HeadConfig& config,
                                                 const ClassRange& classes) {
  if (classes == ClassRange{0, config.vocab_size}) return {};
  return {{"classes", absl::StrCat("[", classes.begin, ", ", classes.end, ") of ", config.vocab_size)}};
}

// ---- The manifest ----

namespace {

constexpr char kFormat[] = "lossd checkpoint";
constexpr int kOneFile = 3;  // version of a manifest with one shard
constexpr int kSharded = 4;  // version of a manifest with several shards
// A manifest with one shard has about 3 KiB, 100 JSON values and a depth of 2. A manifest with kMostShards
// shards of 13 tensors has 26,000 values in less than 700 KiB, and a depth of 4.
constexpr formats::JsonLimits kLimits = {.values = 40'000};
constexpr int64_t kMostFileBytes = int64_t{1} << 53;  // so that the sum over kMostShards does not overflow
constexpr char kChecksumKey[] = "checksum";

constexpr kernels::Norm kNorms[] = {kernels::Norm::kNone, kernels::Norm::kLayerNorm, kernels::Norm::kRmsNorm};
constexpr kernels::OptimizerState kStates[] = {
    kernels::OptimizerState::kNone, kernels::OptimizerState::kMomentum, kernels::OptimizerState::kAdam};
constexpr kernels::Logits kLogits[] = {kernels::Logits::kStored, kernels::Logits::kRecomputed,
                                       kernels::Logits::kNone};
constexpr kernels::Split kSplits[] = {kernels::Split::kAny, kernels::Split::kRows,
                                      kernels::Split::kVocabulary};
constexpr kernels::Residency kResidencies[] = {kernels::Residency::kDevice, kernels::Residency::kHost};
constexpr kernels::Gradients kGradients[] = {kernels::Gradients::kExact, kernels::Gradients::kFiltered,
                                             kernels::Gradients::kSampled, kernels::Gradients::kAuto};
constexpr kernels::DType kDTypes[] = {kernels::DType::kFloat32, kernels::DType::kFloat16,
                                      kernels::DType::kBFloat16};

// Sets `result` to the one of `values` that has this name; false if there is none.
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

// Encodes ascending classes as one short string: the first class, then the differences, e.g. "3,1,20". One
// string counts as one value, and the number of values in a manifest is limited.
std::string EncodeClasses(const std::vector<int32_t>& classes) {
  std::string text;
  for (size_t i = 0; i < classes.size(); ++i) {
    absl::StrAppend(&text, i == 0 ? "" : ",", i == 0 ? classes[i] : classes[i] - classes[i - 1]);
  }
  return text;
}

// False if EncodeClasses does not write such a text.
bool DecodeClasses(absl::string_view text, std::vector<int32_t>* classes) {
  int64_t last = 0;
  for (const absl::string_view part : absl::StrSplit(text, ',')) {
    int32_t step = 0;
    if (!absl::SimpleAtoi(part, &step) || step < 0 || (step == 0 && !classes->empty())) return false;
    last += step;
    if (last > std::numeric_limits<int32_t>::max() || classes->size() == kernels::kMostListedClasses)
      return false;
    classes->push_back(static_cast<int32_t>(last));
  }
  return true;
}

Json EncodeSubject(const CheckpointSubject& subject) {
  const kernels::HeadConfig& config = subject.config;
  Json json = {{"name", subject.head},
               {"hidden_size", config.hidden_size},
               {"vocab_size", config.vocab_size},
               {"bias", config.has_bias},
               {"class_weights", config.has_class_weights},
               {"norm", std::string(Name(config.norm))},
               {"norm_epsilon", config.norm_epsilon},
               {"compute_dtype", std::string(Name(config.compute_dtype))},
               {"optimizer_state", std::string(Name(config.optimizer_state))},
               {"trainable", config.trainable},
               {"logits", std::string(Name(config.logits))},
               {"gradients", std::string(Name(config.gradients))},
               {"workspace_bytes", config.workspace_bytes},
               {"split", std::string(Name(config.split))}};
  if (!config.shares.empty()) json["shares"] = config.shares;
  if (config.replicas > 0) json["replicas"] = config.replicas;
  if (config.residency != kernels::Residency::kDevice)
    json["residency"] = std::string(Name(config.residency));
  if (!config.class_list.empty()) {
    json["class_list"] = EncodeClasses(config.class_list.classes());
    json["full_vocab_size"] = config.class_list.full_size();
  }
  return json;
}

// A number out of range becomes -1, which kernels::Validate refuses.
int32_t ToInt32(const Json& json) {
  const int64_t value = json.get_ref<const int64_t&>();
  return value < 0 || value > std::numeric_limits<int32_t>::max() ? -1 : static_cast<int32_t>(value);
}

// Throws Json::exception for a missing key or a value of another type (a fraction where an integer belongs,
// too); false for a value out of range.
bool DecodeSubject(const Json& json, CheckpointSubject* subject) {
  const Json& head = json.at("head");
  kernels::HeadConfig& config = subject->config;
  subject->head = head.at("name").get<std::string>();
  config.hidden_size = head.at("hidden_size").get_ref<const int64_t&>();
  config.vocab_size = head.at("vocab_size").get_ref<const int64_t&>();
  config.has_bias = head.at("bias").get<bool>();
  config.has_class_weights = head.at("class_weights").get<bool>();
  config.norm_epsilon = head.at("norm_epsilon").get<float>();
  config.trainable = head.at("trainable").get<bool>();
  config.workspace_bytes = head.at("workspace_bytes").get_ref<const int64_t&>();
  if (head.contains("shares")) {
    for (const Json& share : head.at("shares").get_ref<const Json::array_t&>()) {
      config.shares.push_back(ToInt32(share));
    }
  }
  if (head.contains("replicas")) config.replicas = ToInt32(head.at("replicas"));
  if (head.contains("class_list")) {
    std::vector<int32_t> classes;
    if (!DecodeClasses(head.at("class_list").get_ref<const std::string&>(), &classes)) return false;
    config.class_list = {std::move(classes), head.at("full_vocab_size").get_ref<const int64_t&>()};
  }
  return absl::SimpleHexAtoi(json.at("incarnation").get<std::string>(), &subject->incarnation) &&
         FromName<kernels::Norm>(kNorms, head.at("norm").get<std::string>(), &config.norm) &&
         FromName<kernels::DType>(kDTypes, head.at("compute_dtype").get<std::string>(),
                                  &config.compute_dtype) &&
         FromName<kernels::OptimizerState>(kStates, head.at("optimizer_state").get<std::string>(),
                                           &config.optimizer_state) &&
         FromName<kernels::Logits>(kLogits, head.at("logits").get<std::string>(), &config.logits) &&
         (!head.contains("residency") ||
          FromName<kernels::Residency>(kResidencies, head.at("residency").get<std::string>(),
                                       &config.residency)) &&
         (!head.contains("split") ||  // absent in checkpoints of older servers
          FromName<kernels::Split>(kSplits, head.at("split").get<std::string>(), &config.split)) &&
         FromName<kernels::Gradients>(kGradients, head.at("gradients").get<std::string>(),
                                      &config.gradients) &&
         kernels::Validate(config).ok();
}

Json EncodeTensors(const std::vector<ManifestTensor>& tensors) {
  Json lines = Json::array();
  for (const ManifestTensor& tensor : tensors) {
    lines.push_back({{"name", tensor.name}, {"bytes", tensor.bytes}, {"xxh3_64", tensor.checksum}});
  }
  return lines;
}

// Array and DecodeTensors throw as DecodeSubject does.
const Json::array_t& Array(const Json& json) { return json.get_ref<const Json::array_t&>(); }

std::vector<ManifestTensor> DecodeTensors(const Json& lines) {
  std::vector<ManifestTensor> tensors;
  for (const Json& line : Array(lines)) {
    tensors.push_back({line.at("name").get<std::string>(), line.at("bytes").get_ref<const int64_t&>(),
                       line.at("xxh3_64").get<std::string>()});
  }
  return tensors;
}

Json EncodeShards(const std::vector<ManifestShard>& shards) {
  Json lines = Json::array();
  for (const ManifestShard& shard : shards) {
    lines.push_back({{"file", shard.file},
                     {"file_bytes", shard.file_bytes},
                     {"classes", {shard.classes.begin, shard.classes.end}},
                     {"tensors", EncodeTensors(shard.tensors)}});
  }
  return lines;
}

// Decodes one entry of a shard. DATA_LOSS if it has values that a shard cannot have. `file`: the name that it
// must have.
absl::Status DecodeShard(const Json& line, const ClassRange& classes, const std::string& file,
                         ManifestShard* shard) {
  shard->file = line.at("file").get<std::string>();
  shard->file_bytes = line.at("file_bytes").get_ref<const int64_t&>();
  shard->classes = classes;
  shard->tensors = DecodeTensors(line.at("tensors"));
  if (shard->file != file) {
    return absl::DataLossError(
        absl::StrCat("the manifest names a file other than ", file, " for ", classes.Text()));
  }
  if (shard->file_bytes >= 0 && shard->file_bytes <= kMostFileBytes) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("the manifest says that ", file, ", ", classes.Text(), ", has ",
                                          errors::ExactBytes(shard->file_bytes)));
}

// Decodes the entries of all shards. DATA_LOSS, naming a file and its range, unless the shards have each
// class once, in order.
absl::Status DecodeShards(const Json& lines, int64_t vocab_size, std::vector<ManifestShard>* shards) {
  int64_t next = 0;
  for (const Json& line : Array(lines)) {
    const std::string file = ShardFile(shards->size(), lines.size());
    const Json& range = line.at("classes");
    (void)Array(range);
    const ClassRange classes = {range.at(0).get_ref<const int64_t&>(), range.at(1).get_ref<const int64_t&>()};
    if (range.size() != 2 || classes.begin != next || classes.end <= next || classes.end > vocab_size) {
      return absl::DataLossError(absl::StrCat("the manifest says that ", file, " has ", classes.Text(),
                                              ", where classes from ", next, " on belong"));
    }
    LOSSD_RETURN_IF_ERROR(DecodeShard(line, classes, file, &shards->emplace_back()));
    next = classes.end;
  }
  if (next == vocab_size && shards->size() > 1 && shards->size() <= kMostShards) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("the manifest's ", shards->size(), " shards have ",
                                          ClassRange{0, next}.Text(), " of ", vocab_size));
}

// Throws and returns as DecodeSubject does.
bool DecodeRecord(const Json& json, Manifest* manifest) {
  std::string error;
  CheckpointSubject& subject = manifest->subject;
  manifest->automatic = json.at("automatic").get<bool>();
  return DecodeHistory(json, &subject) && subject.updates <= subject.step &&
         absl::ParseTime(absl::RFC3339_full, json.at("saved_at").get<std::string>(), &manifest->saved_at,
                         &error) &&
         absl::UnixEpoch() <= manifest->saved_at && manifest->saved_at <= kLatestSave &&
         DecodeLastStep(json.at("last_step"), &subject.last_step);
}

// Decodes a manifest whose version and checksum have been checked. Throws as DecodeSubject. DATA_LOSS for
// values that a manifest of this version cannot have.
absl::Status DecodeContent(const Json& json, int version, Manifest* manifest) {
  LOSSD_RETURN_IF_ERROR(DecodeCounts(json, manifest));
  if (!DecodeSubject(json, &manifest->subject) || !DecodeRecord(json, manifest)) {
    return absl::DataLossError("the manifest has a value out of range");
  }
  const int64_t vocab_size = manifest->subject.config.vocab_size;
  if (version == kSharded) return DecodeShards(json.at("shards"), vocab_size, &manifest->shards);
  return DecodeShard(json, {0, vocab_size}, ShardFile(0, 1), &manifest->shards.emplace_back());
}

}  // namespace

int64_t ShardBytes(const Manifest& manifest) {
  int64_t bytes = 0;
  for (const ManifestShard& shard : manifest.shards) bytes += shard.file_bytes;
  return bytes;
}

std::string EncodeManifest(const Manifest& manifest) {
  const CheckpointSubject& subject = manifest.subject;
  Json json = {{"format", kFormat},
               {"version", manifest.shards.size() == 1 ? kOneFile : kSharded},
               {"head", EncodeSubject(subject)},
               {"step", subject.step},
               {"updates", subject.updates},
               {"incarnation", EncodeIncarnation(subject.incarnation)},
               {"last_step", EncodeLastStep(subject.last_step)},
               {"saved_at", absl::FormatTime(absl::RFC3339_sec, manifest.saved_at, absl::UTCTimeZone())},
               {"automatic", manifest.automatic}};
  if (manifest.save_number != 0) json["save_number"] = manifest.save_number;
  if (Json history = EncodeHistory(subject); !history.empty()) json["history"] = std::move(history);
  if (manifest.shards.size() == 1) {
    const ManifestShard& shard = manifest.shards[0];
    json["file"] = shard.file;
    json["file_bytes"] = shard.file_bytes;
    json["tensors"] = EncodeTensors(shard.tensors);
  } else {
    json["shards"] = EncodeShards(manifest.shards);
  }
  json[kChecksumKey] = DigestOf(json);
  return json.dump(2) + "\n";
}

absl::StatusOr<Manifest> DecodeManifest(absl::string_view text) {
  std::optional<Json> parsed = formats::ParseStrictJson<Json>(text, kLimits);
  if (!parsed.has_value() || !parsed->is_object() || parsed->value("format", Json()) != Json(kFormat)) {
    return absl::DataLossError("the manifest is no manifest of a checkpoint");
  }
  Json& json = *parsed;
  const Json version = json.value("version", Json());
  if (version != Json(kOneFile) && version != Json(kSharded)) {
    return absl::FailedPreconditionError(
        absl::StrCat("the manifest has version ", version.dump().substr(0, kMostShown),
                     "; this server reads versions ", kOneFile, " and ", kSharded));
  }
  const Json checksum = json.value(kChecksumKey, Json());
  json.erase(kChecksumKey);
  if (checksum != Json(DigestOf(json))) return absl::DataLossError("the manifest's checksum does not match");
  Manifest manifest;
  try {
    LOSSD_RETURN_IF_ERROR(DecodeContent(json, version.get<int>(), &manifest));
  } catch (const Json::exception& error) {
    return absl::DataLossError(absl::StrCat("the manifest is incomplete: ", error.what()));
  }
  return manifest;
}

absl::StatusOr<Manifest> ReadManifest(const std::string& directory, absl::string_view checkpoint) {
  const auto failed = [&](absl::StatusCode code, absl::string_view what) {
    return absl::Status(code, absl::StrCat("checkpoint ", checkpoint, ": ", what));
  };
  const auto file = OpenBelow(directory, absl::StrCat(checkpoint, "/", kManifestFile));
  if (!file.ok()) return failed(file.status().code(), file.status().message());
  if ((*file)->size() > kLimits.bytes) {
    return failed(absl::StatusCode::kDataLoss, "the manifest is too long");
  }
  std::string text(static_cast<size_t>((*file)->size()), '\0');
  const auto bytes = absl::MakeSpan(reinterpret_cast<uint8_t*>(text.data()), text.size());
  if (absl::Status status = (*file)->ReadAt(0, bytes); !status.ok()) {
    return failed(status.code(), status.message());
  }
  absl::StatusOr<Manifest> manifest = DecodeManifest(text);
  if (!manifest.ok()) return failed(manifest.status().code(), manifest.status().message());
  return manifest;
}

std::string ContentDigest(const Manifest& manifest) {
  const CheckpointSubject& subject = manifest.subject;
  Json content = {{"head", EncodeSubject(subject)},
                  {"step", subject.step},
                  {"updates", subject.updates},
                  {"last_step", EncodeLastStep(subject.last_step)}};
  if (manifest.shards.size() == 1) {
    content["tensors"] = EncodeTensors(manifest.shards[0].tensors);
    return DigestOf(content);
  }
  Json& shards = content["shards"] = Json::array();
  for (const ManifestShard& shard : manifest.shards) {
    shards.push_back(
        {{"classes", {shard.classes.begin, shard.classes.end}}, {"tensors", EncodeTensors(shard.tensors)}});
  }
  return DigestOf(content);
}

// ---- Counters, the last step, the history ----

namespace {

constexpr size_t kMostRunBytes = 512;                    // 128 characters
constexpr int64_t kLatestUnixSeconds = 253'402'300'799;  // the end of the year 9999
constexpr char kAdamW[] = "adamw";
constexpr char kSgd[] = "sgd";

// The error of a counter that is out of range or not an integer.
absl::Status BadCount(absl::string_view field, const Json& value) {
  return absl::DataLossError(absl::StrCat("the manifest's ", field, " is ",
                                          value.dump().substr(0, kMostShown),
                                          ", which is no whole number from 0 to ", kMostCounted));
}

template <typename Integer>
absl::Status DecodeCount(const Json& json, absl::string_view path, const char* field, Integer* count) {
  const Json& value = json.at(field);
  if (!value.is_number_unsigned() || value.get<uint64_t>() > kMostCounted) {
    return BadCount(absl::StrCat(path, field), value);
  }
  *count = static_cast<Integer>(value.get<uint64_t>());
  return absl::OkStatus();
}

// JSON has no numbers for infinity and NaN.
Json EncodeNumber(double value) { return std::isfinite(value) ? Json(value) : Json(absl::StrCat(value)); }

bool DecodeNumber(const Json& json, double* value) {
  if (json.is_string()) return absl::SimpleAtod(json.get<std::string>(), value) && !std::isfinite(*value);
  *value = json.get<double>();
  return true;
}

}  // namespace

std::string EncodeIncarnation(uint64_t incarnation) {
  return absl::StrCat(absl::Hex(incarnation, absl::kZeroPad16));
}

Json EncodeLastStep(const std::optional<AppliedStep>& step) {
  if (!step.has_value()) return Json();
  const kernels::OptimizerOptions& optimizer = step->optimizer;
  const bool adamw = optimizer.kind == kernels::OptimizerOptions::Kind::kAdamW;
  Json json = {{"incarnation", EncodeIncarnation(step->incarnation)},
               {"generation", step->generation},
               {"optimizer",
                {{"kind", adamw ? kAdamW : kSgd},
                 {"learning_rate", optimizer.learning_rate},
                 {"weight_decay", optimizer.weight_decay},
                 {"decay_vectors", optimizer.decay_vectors},
                 {"grad_multiplier", optimizer.grad_multiplier},
                 {"beta1", optimizer.beta1},
                 {"beta2", optimizer.beta2},
                 {"epsilon", optimizer.epsilon},
                 {"momentum", optimizer.momentum},
                 {"dampening", optimizer.dampening},
                 {"nesterov", optimizer.nesterov}}},
               {"grad_norm", EncodeNumber(step->grad_norm)},
               {"microbatches", step->microbatches},
               {"contributions", step->contributions},
               {"rows", step->rows},
               {"skipped", step->skipped}};
  if (optimizer.lazy_rows) json["optimizer"]["lazy_rows"] = true;
  if (step->begin_optimizer) json["begin_optimizer"] = true;
  return json;
}

// Throws and returns as DecodeSubject does.
bool DecodeLastStep(const Json& json, std::optional<AppliedStep>* step) {
  if (json.is_null()) return true;
  if (!step->has_value()) return false;
  AppliedStep& applied = **step;  // DecodeCounts has created it
  kernels::OptimizerOptions& optimizer = applied.optimizer;
  const Json& saved = json.at("optimizer");
  const std::string kind = saved.at("kind").get<std::string>();
  optimizer.kind =
      kind == kAdamW ? kernels::OptimizerOptions::Kind::kAdamW : kernels::OptimizerOptions::Kind::kSgd;
  optimizer.learning_rate = saved.at("learning_rate").get<double>();
  optimizer.weight_decay = saved.at("weight_decay").get<double>();
  optimizer.decay_vectors = saved.at("decay_vectors").get<bool>();
  optimizer.grad_multiplier = saved.at("grad_multiplier").get<double>();
  optimizer.beta1 = saved.at("beta1").get<double>();
  optimizer.beta2 = saved.at("beta2").get<double>();
  optimizer.epsilon = saved.at("epsilon").get<double>();
  optimizer.momentum = saved.at("momentum").get<double>();
  optimizer.dampening = saved.at("dampening").get<double>();
  optimizer.nesterov = saved.at("nesterov").get<bool>();
  optimizer.lazy_rows = saved.value("lazy_rows", false);  // written only if true
  applied.skipped = json.at("skipped").get<bool>();
  applied.begin_optimizer = json.value("begin_optimizer", false);  // absent in manifests of older servers
  return (kind == kAdamW || kind == kSgd) && kernels::Validate(optimizer).ok() &&
         absl::SimpleHexAtoi(json.at("incarnation").get<std::string>(), &applied.incarnation) &&
         DecodeNumber(json.at("grad_norm"), &applied.grad_norm);
}

Json EncodeHistory(const CheckpointSubject& subject) {
  Json json = Json::object();
  if (!subject.run.empty()) json["run"] = subject.run;
  if (subject.applied_unix_seconds != 0) json["applied_unix_seconds"] = subject.applied_unix_seconds;
  return json;
}

// As DecodeSubject. Manifests of older servers have no history.
bool DecodeHistory(const Json& json, CheckpointSubject* subject) {
  if (!json.contains("history")) return true;
  const Json& history = json.at("history");
  if (!history.is_object()) return false;
  if (history.contains("run")) subject->run = history.at("run").get<std::string>();
  if (history.contains("applied_unix_seconds")) {
    subject->applied_unix_seconds = history.at("applied_unix_seconds").get_ref<const int64_t&>();
  }
  const auto is_control = [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; };
  if (subject->applied_unix_seconds < 0 || subject->applied_unix_seconds > kLatestUnixSeconds) return false;
  return subject->run.size() <= kMostRunBytes &&
         std::none_of(subject->run.begin(), subject->run.end(), is_control);
}

absl::Status DecodeCounts(const Json& json, Manifest* manifest) {
  CheckpointSubject& subject = manifest->subject;
  absl::Status status = DecodeCount(json, "", "step", &subject.step);
  if (status.ok()) status = DecodeCount(json, "", "updates", &subject.updates);
  if (status.ok() && json.contains("save_number")) {  // absent in manifests of older servers
    status = DecodeCount(json, "", "save_number", &manifest->save_number);
  }
  const Json& last = json.at("last_step");
  if (!status.ok() || !last.is_object()) return status;
  AppliedStep& applied = subject.last_step.emplace();
  constexpr absl::string_view kLast = "last_step.";
  status.Update(DecodeCount(last, kLast, "microbatches", &applied.microbatches));
  status.Update(DecodeCount(last, kLast, "contributions", &applied.contributions));
  status.Update(DecodeCount(last, kLast, "rows", &applied.rows));
  if (last.contains("generation")) {  // absent in manifests of older servers
    status.Update(DecodeCount(last, kLast, "generation", &applied.generation));
  }
  return status;
}

// ---- Checksum ----

void Checksum::Free::operator()(XXH3_state_s* state) const { XXH3_freeState(state); }

Checksum::Checksum() : state_(XXH3_createState()) { XXH3_64bits_reset(state_.get()); }

void Checksum::Update(absl::Span<const uint8_t> bytes) {
  XXH3_64bits_update(state_.get(), bytes.data(), bytes.size());
}

std::string Checksum::Digest() const {
  return absl::StrCat(absl::Hex(XXH3_64bits_digest(state_.get()), absl::kZeroPad16));
}

}  // namespace lossd::head
