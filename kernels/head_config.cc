// SPDX-License-Identifier: Apache-2.0
#include "kernels/head_config.h"

#include <cmath>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"

namespace lossd::kernels {
namespace {

// Keeps every byte count of a head (V * D * 16 and the like) far from 2^63.
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
  if (config.logits > Logits::kRecomputed) {
    return errors::FieldError("logits", "be stored or recomputed", static_cast<int>(config.logits));
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
  if (absl::Status status = ValidateReplicas(config); !status.ok()) return status;
  return ValidateShares(config);
}

absl::Status ValidateOn(const HeadConfig& config, int devices) {
  if (absl::Status status = Validate(config); !status.ok()) return status;
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
