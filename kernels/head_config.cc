// SPDX-License-Identifier: Apache-2.0
// Names and checks of options and configs (head_config.h).
#include "kernels/head_config.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

namespace lossd::kernels {
namespace {

constexpr float kLeastThreshold = 1e-30f;
constexpr float kLeastSoftcap = std::numeric_limits<float>::min();
constexpr double kLargeLse = 100.0;  // a log-sum-exp is expected to stay below this

}  // namespace

absl::string_view Name(Gradients gradients) {
  switch (gradients) {
    case Gradients::kExact:
      return "exact";
    case Gradients::kFiltered:
      return "filtered";
    case Gradients::kSampled:
      return "sampled";
    case Gradients::kAuto:
      return "auto";
  }
  return "";
}

namespace {

// Checks `rest`, and the options that must be absent with soft targets.
absl::Status ValidateRest(const LossOptions& options) {
  if (options.rest > kLastRest) {
    return errors::FieldError("rest", "be none, renormalized or one_class", static_cast<int>(options.rest));
  }
  if (!options.has_soft_targets()) return absl::OkStatus();
  if (options.label_smoothing != 0.0f) {
    return errors::FieldError("label_smoothing", "be 0 with soft targets", options.label_smoothing);
  }
  if (options.use_class_weights) {
    return errors::FieldError("use_class_weights", "be false with soft targets", "true");
  }
  if (options.objective.active()) {
    return errors::FieldError("objective", "be absent with soft targets", Name(options.objective.kind));
  }
  if (options.distillation.used()) {
    return errors::FieldError("distillation", "be absent with soft targets",
                              Name(options.distillation.divergence));
  }
  return absl::OkStatus();
}

// Embedding rows have no loss, so options of a loss must be absent.
absl::Status ValidateEmbedding(const LossOptions& options) {
  if (options.embedding > Embedding::kGradients) {
    return errors::FieldError("embedding", "be rows or gradients", static_cast<int>(options.embedding));
  }
  const LossOptions none;
  const std::pair<absl::string_view, bool> given[] = {
      {"logit_scale", options.logit_scale != none.logit_scale},
      {"softcap", options.softcap != none.softcap},
      {"label_smoothing", options.label_smoothing != none.label_smoothing},
      {"z_loss", options.z_loss != none.z_loss},
      {"use_class_weights", options.use_class_weights},
      {"gradients", options.gradients != none.gradients},
      {"filter_epsilon", options.filter_epsilon != none.filter_epsilon},
      {"sample_threshold", options.sample_threshold != none.sample_threshold},
      {"max_gradient_error", options.max_gradient_error != none.max_gradient_error},
      {"objective", options.objective.active()},
      {"distillation", options.distillation.used()},
      {"rest", options.has_soft_targets()}};
  for (const auto& [name, is_given] : given) {
    if (is_given) return errors::FieldError(name, "be absent for rows of an embedding", "given");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Validate(const LossOptions& options) {
  if (options.is_embedding()) return ValidateEmbedding(options);
  if (!std::isfinite(options.logit_scale) || options.logit_scale == 0.0f) {
    return errors::FieldError("logit_scale", "be finite and not 0", options.logit_scale);
  }
  // The reciprocal of a smaller softcap overflows.
  if (!std::isfinite(options.softcap) || (options.softcap != 0.0f && options.softcap < kLeastSoftcap)) {
    return errors::FieldError("softcap", "be 0 (none), or finite and >= 1.1754944e-38", options.softcap);
  }
  if (!(options.label_smoothing >= 0.0f && options.label_smoothing <= 1.0f)) {
    return errors::FieldError("label_smoothing", "be in [0, 1]", options.label_smoothing);
  }
  if (!std::isfinite(options.z_loss) || options.z_loss < 0.0f) {
    return errors::FieldError("z_loss", "be finite and >= 0", options.z_loss);
  }
  if (options.gradients > Gradients::kAuto) {
    return errors::FieldError("gradients", "be exact, filtered, sampled or auto",
                              static_cast<int>(options.gradients));
  }
  if (!(options.filter_epsilon >= 0.0f && options.filter_epsilon < 1.0f)) {
    return errors::FieldError("filter_epsilon", "be in [0, 1)", options.filter_epsilon);
  }
  // The reciprocal of a smaller threshold overflows in fp32.
  if (!(options.sample_threshold >= kLeastThreshold && options.sample_threshold <= 1.0f)) {
    return errors::FieldError("sample_threshold", "be in [1e-30, 1]", options.sample_threshold);
  }
  if (!std::isfinite(options.max_gradient_error) || options.max_gradient_error < 0.0f) {
    return errors::FieldError("max_gradient_error", "be finite and >= 0", options.max_gradient_error);
  }
  LOSSD_RETURN_IF_ERROR(ValidateRest(options));
  LOSSD_RETURN_IF_ERROR(Validate(options.distillation));
  if (options.distillation.used() && options.gradients == Gradients::kFiltered) {
    return errors::FieldError("gradients", "be exact, sampled or auto with distillation",
                              Name(options.gradients));
  }
  if (options.distillation.used() && options.objective.active()) {
    return errors::FieldError("objective", "be absent with distillation", Name(options.objective.kind));
  }
  if (absl::Status status = Validate(options.objective); !status.ok()) {
    return errors::Within("objective.", std::move(status));
  }
  if (!options.objective.active()) return absl::OkStatus();
  if (options.label_smoothing != 0.0f) {
    return errors::FieldError("label_smoothing", "be 0 with an objective", options.label_smoothing);
  }
  if (options.use_class_weights) {
    return errors::FieldError("use_class_weights", "be false with an objective", "true");
  }
  return absl::OkStatus();
}

double LargestSlope(const LossOptions& options, double largest_class_weight) {
  const bool of_row = options.objective.active() || options.has_soft_targets();
  const double hard = of_row ? 0.0 : std::max(1.0, largest_class_weight);
  const double with_target = hard + 2.0 * static_cast<double>(options.z_loss) * kLargeLse;
  const Distillation& distillation = options.distillation;
  if (!distillation.used()) return with_target;
  const double temperature = static_cast<double>(distillation.temperature);
  // The derivative of the reverse KL has logarithms of q / p. The derivatives of the other divergences are at
  // most probabilities.
  const bool logarithms = distillation.divergence == Divergence::kReverseKl;
  const double largest = logarithms ? kLargeLse / std::min(temperature, 1.0) : 1.0;
  return static_cast<double>(distillation.target_weight) * with_target +
         static_cast<double>(distillation.weight) * largest / temperature;
}

absl::string_view WhyExact(const LossOptions& options, bool any_grad_entropy) {
  if (options.gradients == Gradients::kExact) return "exact was asked for";
  if (options.gradients != Gradients::kFiltered) return "";
  if (any_grad_entropy) return "the gradient of an entropy is not proportional to probabilities";
  if (options.label_smoothing > 0.0f && options.softcap > 0.0f) {
    return "label smoothing under a softcap has no closed form";
  }
  if (options.rest == Rest::kOneClass)
    return "the rest of a row's targets lies on classes of any probability";
  return "";
}

Gradients GradientsOf(const LossOptions& options, absl::string_view why_exact) {
  return why_exact.empty() ? options.gradients : Gradients::kExact;
}

namespace {

bool FiniteNonNegative(double value) { return std::isfinite(value) && value >= 0.0; }

bool IsDecayRate(double value) { return value >= 0.0 && value < 1.0; }

absl::Status ValidateAdamW(const OptimizerOptions& options) {
  if (!IsDecayRate(options.beta1)) return errors::FieldError("beta1", "be in [0, 1)", options.beta1);
  if (!IsDecayRate(options.beta2)) return errors::FieldError("beta2", "be in [0, 1)", options.beta2);
  if (!FiniteNonNegative(options.epsilon)) {
    return errors::FieldError("epsilon", "be finite and >= 0", options.epsilon);
  }
  return absl::OkStatus();
}

absl::Status ValidateSgd(const OptimizerOptions& options) {
  if (!FiniteNonNegative(options.momentum)) {
    return errors::FieldError("momentum", "be finite and >= 0", options.momentum);
  }
  if (!std::isfinite(options.dampening))
    return errors::FieldError("dampening", "be finite", options.dampening);
  if (!options.nesterov) return absl::OkStatus();
  if (options.momentum == 0.0)
    return errors::FieldError("momentum", "be > 0 with nesterov", options.momentum);
  if (options.dampening != 0.0)
    return errors::FieldError("dampening", "be 0 with nesterov", options.dampening);
  return absl::OkStatus();
}

}  // namespace

absl::Status Validate(const OptimizerOptions& options) {
  if (!FiniteNonNegative(options.learning_rate)) {
    return errors::FieldError("learning_rate", "be finite and >= 0", options.learning_rate);
  }
  if (!FiniteNonNegative(options.weight_decay)) {
    return errors::FieldError("weight_decay", "be finite and >= 0", options.weight_decay);
  }
  if (!std::isfinite(options.grad_multiplier)) {
    return errors::FieldError("grad_multiplier", "be finite", options.grad_multiplier);
  }
  switch (options.kind) {
    case OptimizerOptions::Kind::kAdamW:
      return ValidateAdamW(options);
    case OptimizerOptions::Kind::kSgd:
      return ValidateSgd(options);
  }
  return errors::FieldError("kind", "be an OptimizerOptions::Kind", static_cast<int>(options.kind));
}

OptimizerState RequiredState(const OptimizerOptions& options) {
  if (options.kind == OptimizerOptions::Kind::kAdamW) return OptimizerState::kAdam;
  return options.momentum > 0.0 ? OptimizerState::kMomentum : OptimizerState::kNone;
}

namespace {

// Keeps byte counts of a head (such as V * D * 16) far below 2^63.
constexpr int64_t kMaxHiddenSize = int64_t{1} << 24;

bool HasParam(const HeadConfig& config, Param param) {
  switch (param) {
    case Param::kWeight:
      return true;
    case Param::kBias:
      return config.has_bias;
    case Param::kNormGain:
      return config.norm != Norm::kNone;
    case Param::kNormShift:
      return config.norm == Norm::kLayerNorm;
    case Param::kClassWeights:
      return config.has_class_weights;
  }
  return false;
}

absl::Status ValidateReplicas(const HeadConfig& config) {
  if (config.replicas < 0 || config.replicas > kMostReplicas) {
    return errors::FieldError("replicas", absl::StrCat("be in [0, ", kMostReplicas, "]"), config.replicas);
  }
  if (config.replicas > 1 && config.split == Split::kRows) {
    return errors::FieldError("split", "be vocabulary with replicas", Name(config.split));
  }
  return absl::OkStatus();
}

absl::Status ValidateShares(const HeadConfig& config) {
  if (config.shares.empty()) return absl::OkStatus();
  if (config.split == Split::kRows) {
    return errors::FieldError("split", "be vocabulary with shares", Name(config.split));
  }
  int64_t sum = 0;
  for (size_t i = 0; i < config.shares.size(); ++i) {
    if (config.shares[i] < 0) {
      return errors::FieldError(absl::StrCat("shares[", i, "]"), "be >= 0", config.shares[i]);
    }
    sum += config.shares[i];
  }
  constexpr int64_t kMostShares = std::numeric_limits<int32_t>::max();
  if (sum < 1 || sum > kMostShares) {
    return errors::FieldError("shares", absl::StrCat("have a sum in [1, ", kMostShares, "]"), sum);
  }
  return absl::OkStatus();
}

absl::Status ValidateClassList(const HeadConfig& config) {
  if (config.class_list.empty()) return absl::OkStatus();
  const std::vector<int32_t>& classes = config.class_list.classes();
  const int64_t full_size = config.class_list.full_size();
  if (classes.size() > kMostListedClasses) {
    return errors::FieldError("class_list", absl::StrCat("have at most ", kMostListedClasses, " entries"),
                              absl::StrCat(classes.size(), " entries"));
  }
  if (static_cast<int64_t>(classes.size()) != config.vocab_size) {
    return errors::FieldError("class_list", absl::StrCat("have vocab_size entries, ", config.vocab_size),
                              absl::StrCat(classes.size(), " entries"));
  }
  if (full_size < config.vocab_size || full_size > std::numeric_limits<int32_t>::max()) {
    return errors::FieldError("full_vocab_size",
                              absl::StrCat("be in [", config.vocab_size, ", 2^31 - 1] with class_list"),
                              full_size);
  }
  for (size_t i = 0; i < classes.size(); ++i) {
    const int32_t least = i == 0 ? 0 : classes[i - 1] + 1;
    if (classes[i] >= least && classes[i] < full_size) continue;
    return errors::FieldError(absl::StrCat("class_list[", i, "]"),
                              absl::StrCat("be in [", least, ", ", full_size, "), above the one before it"),
                              classes[i]);
  }
  return absl::OkStatus();
}

}  // namespace

namespace {

absl::Status ValidateResidency(const HeadConfig& config) {
  if (config.residency == Residency::kDevice) return absl::OkStatus();
  if (config.residency > Residency::kHost) {
    return errors::FieldError("residency", "be device or host", static_cast<int>(config.residency));
  }
  if (config.trainable) {
    return errors::FieldError("residency", "be device unless the head is frozen", Name(config.residency));
  }
  if (config.split != Split::kVocabulary && config.shares.empty() && config.replicas <= 1) {
    return absl::OkStatus();
  }
  return errors::FieldError("residency", "be device for a head that is split by vocabulary",
                            Name(config.residency), absl::StatusCode::kUnimplemented);
}

// A head without logits (Logits::kNone) must not have options that belong to logits, and no options that
// embeddings do not support.
absl::Status ValidateEmbeddingAlone(const HeadConfig& config) {
  if (config.logits != Logits::kNone) return absl::OkStatus();
  if (config.has_bias) return errors::FieldError("bias", "be false without logits", "true");
  if (config.has_class_weights) return errors::FieldError("class_weights", "be false without logits", "true");
  if (config.norm != Norm::kNone)
    return errors::FieldError("norm", "be none without logits", Name(config.norm));
  if (!config.class_list.empty()) {
    return errors::FieldError("class_list", "be empty without logits",
                              absl::StrCat(config.class_list.classes().size(), " entries"));
  }
  if (config.residency == Residency::kDevice) return absl::OkStatus();
  return errors::FieldError("residency", "be device without logits", Name(config.residency));
}

}  // namespace

absl::Status Validate(const HeadConfig& config) {
  if (config.hidden_size < 1 || config.hidden_size > kMaxHiddenSize) {
    return errors::FieldError("hidden_size", absl::StrCat("be in [1, ", kMaxHiddenSize, "]"),
                              config.hidden_size);
  }
  constexpr int64_t kMaxVocab = std::numeric_limits<int32_t>::max();
  if (config.vocab_size < 1 || config.vocab_size > kMaxVocab) {
    return errors::FieldError("vocab_size", absl::StrCat("be in [1, ", kMaxVocab, "]"), config.vocab_size);
  }
  if (config.norm > Norm::kRmsNorm) {
    return errors::FieldError("norm", "be none, layernorm or rmsnorm", static_cast<int>(config.norm));
  }
  if (!std::isfinite(config.norm_epsilon) || config.norm_epsilon < 0.0f) {
    return errors::FieldError("norm_epsilon", "be finite and >= 0", config.norm_epsilon);
  }
  if (config.compute_dtype > DType::kBFloat16) {
    return errors::FieldError("compute_dtype", "be fp32, fp16 or bf16",
                              static_cast<int>(config.compute_dtype));
  }
  if (config.optimizer_state > OptimizerState::kAdam) {
    return errors::FieldError("optimizer_state", "be none, momentum or adam",
                              static_cast<int>(config.optimizer_state));
  }
  if (config.logits > Logits::kNone) {
    return errors::FieldError("logits", "be stored, recomputed or none", static_cast<int>(config.logits));
  }
  if (config.gradients > Gradients::kAuto) {
    return errors::FieldError("gradients", "be exact, filtered, sampled or auto",
                              static_cast<int>(config.gradients));
  }
  if (config.workspace_bytes < 0) {
    return errors::FieldError("workspace_bytes", "be >= 0 (0: the server's)", config.workspace_bytes);
  }
  if (config.split > Split::kVocabulary) {
    return errors::FieldError("split", "be any, rows or vocabulary", static_cast<int>(config.split));
  }
  LOSSD_RETURN_IF_ERROR(ValidateEmbeddingAlone(config));
  LOSSD_RETURN_IF_ERROR(ValidateReplicas(config));
  LOSSD_RETURN_IF_ERROR(ValidateClassList(config));
  LOSSD_RETURN_IF_ERROR(ValidateShares(config));
  return ValidateResidency(config);
}

absl::Status ValidateOn(const HeadConfig& config, int devices) {
  LOSSD_RETURN_IF_ERROR(Validate(config));
  const int replicas = ReplicasOf(config);
  if (devices % replicas != 0) {
    return errors::FieldError("replicas", absl::StrCat("divide the server's devices, ", devices),
                              config.replicas);
  }
  const int each = devices / replicas;
  if (config.shares.empty() || config.shares.size() == static_cast<size_t>(each)) return absl::OkStatus();
  const std::string of = replicas == 1 ? "the server's devices" : "the devices of a replica";
  return errors::FieldError("shares", absl::StrCat("have one entry for each of ", of, ", ", each),
                            absl::StrCat(config.shares.size(), " entries"));
}

absl::string_view Name(Param param) {
  switch (param) {
    case Param::kWeight:
      return "weight";
    case Param::kBias:
      return "bias";
    case Param::kNormGain:
      return "norm.gain";
    case Param::kNormShift:
      return "norm.shift";
    case Param::kClassWeights:
      return "class_weights";
  }
  return "unknown";
}

absl::string_view Name(Role role) {
  switch (role) {
    case Role::kValue:
      return "value";
    case Role::kGradient:
      return "gradient";
    case Role::kMoment1:
      return "moment1";
    case Role::kMoment2:
      return "moment2";
  }
  return "unknown";
}

absl::string_view Name(Norm norm) {
  switch (norm) {
    case Norm::kNone:
      return "none";
    case Norm::kLayerNorm:
      return "layernorm";
    case Norm::kRmsNorm:
      return "rmsnorm";
  }
  return "unknown";
}

absl::string_view Name(Logits logits) {
  switch (logits) {
    case Logits::kStored:
      return "stored";
    case Logits::kRecomputed:
      return "recomputed";
    case Logits::kNone:
      return "none";
  }
  return "unknown";
}

absl::string_view Name(Split split) {
  switch (split) {
    case Split::kAny:
      return "any";
    case Split::kRows:
      return "rows";
    case Split::kVocabulary:
      return "vocabulary";
  }
  return "";
}

absl::string_view Name(Residency residency) {
  switch (residency) {
    case Residency::kDevice:
      return "device";
    case Residency::kHost:
      return "host";
  }
  return "unknown";
}

absl::string_view Name(OptimizerState state) {
  switch (state) {
    case OptimizerState::kNone:
      return "none";
    case OptimizerState::kMomentum:
      return "momentum";
    case OptimizerState::kAdam:
      return "adam";
  }
  return "unknown";
}

bool HasTensor(const HeadConfig& config, TensorId id) {
  if (!HasParam(config, id.param)) return false;
  if (id.role == Role::kValue) return true;
  if (!config.trainable || id.param == Param::kClassWeights) return false;
  switch (id.role) {
    case Role::kGradient:
      return true;
    case Role::kMoment1:
      return config.optimizer_state >= OptimizerState::kMomentum;
    case Role::kMoment2:
      return config.optimizer_state >= OptimizerState::kAdam;
    default:
      return false;
  }
}

TensorShape ShapeOf(const HeadConfig& config, Param param) {
  switch (param) {
    case Param::kWeight:
      return {config.vocab_size, config.hidden_size};
    case Param::kBias:
    case Param::kClassWeights:
      return {config.vocab_size, 1};
    case Param::kNormGain:
    case Param::kNormShift:
      return {config.hidden_size, 1};
  }
  return {};
}

}  // namespace lossd::kernels
