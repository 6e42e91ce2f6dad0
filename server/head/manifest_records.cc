// SPDX-License-Identifier: Apache-2.0
#include "server/head/manifest_records.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace lossd::head {
namespace {

constexpr size_t kMostRunBytes = 512;                    // 128 characters
constexpr int64_t kLatestUnixSeconds = 253'402'300'799;  // the end of the year 9999
constexpr char kAdamW[] = "adamw";
constexpr char kSgd[] = "sgd";

// A counter that is out of range, or no whole number.
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
  if (step->begin_optimizer) json["begin_optimizer"] = true;
  return json;
}

// As DecodeSubject.
bool DecodeLastStep(const Json& json, std::optional<AppliedStep>* step) {
  if (json.is_null()) return true;
  if (!step->has_value()) return false;
  AppliedStep& applied = **step;  // DecodeCounts has made it
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
  applied.skipped = json.at("skipped").get<bool>();
  applied.begin_optimizer = json.value("begin_optimizer", false);  // manifests of older servers have none
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

// As DecodeSubject. Manifests of older servers have none.
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
  if (status.ok() && json.contains("save_number")) {  // manifests of older servers have none
    status = DecodeCount(json, "", "save_number", &manifest->save_number);
  }
  const Json& last = json.at("last_step");
  if (!status.ok() || !last.is_object()) return status;
  AppliedStep& applied = subject.last_step.emplace();
  constexpr absl::string_view kLast = "last_step.";
  status.Update(DecodeCount(last, kLast, "microbatches", &applied.microbatches));
  status.Update(DecodeCount(last, kLast, "contributions", &applied.contributions));
  status.Update(DecodeCount(last, kLast, "rows", &applied.rows));
  if (last.contains("generation")) {  // manifests of older servers have none
    status.Update(DecodeCount(last, kLast, "generation", &applied.generation));
  }
  return status;
}

}  // namespace lossd::head
