// SPDX-License-Identifier: Apache-2.0
#include "server/messages/enums.h"

#include "kernels/errors/field_error.h"

namespace lossd::messages {

using errors::FieldError;

absl::StatusOr<kernels::DType> ToDType(v1::DType dtype, absl::string_view field) {
  switch (dtype) {
    case v1::DTYPE_FP32:
      return kernels::DType::kFloat32;
    case v1::DTYPE_FP16:
      return kernels::DType::kFloat16;
    case v1::DTYPE_BF16:
      return kernels::DType::kBFloat16;
    default:
      return FieldError(field, "be DTYPE_FP32, DTYPE_FP16 or DTYPE_BF16", static_cast<int>(dtype));
  }
}

absl::StatusOr<kernels::DType> ToDType(v1::DType dtype, absl::string_view field, kernels::DType fallback) {
  if (dtype == v1::DTYPE_UNSPECIFIED) return fallback;
  return ToDType(dtype, field);
}

v1::DType ToProto(kernels::DType dtype) {
  switch (dtype) {
    case kernels::DType::kFloat32:
      return v1::DTYPE_FP32;
    case kernels::DType::kFloat16:
      return v1::DTYPE_FP16;
    case kernels::DType::kBFloat16:
      return v1::DTYPE_BF16;
  }
  return v1::DTYPE_UNSPECIFIED;
}

absl::StatusOr<kernels::Norm> ToNorm(v1::Norm norm, absl::string_view field) {
  switch (norm) {
    case v1::NORM_UNSPECIFIED:
    case v1::NORM_NONE:
      return kernels::Norm::kNone;
    case v1::NORM_LAYERNORM:
      return kernels::Norm::kLayerNorm;
    case v1::NORM_RMSNORM:
      return kernels::Norm::kRmsNorm;
    default:
      return FieldError(field, "be a known Norm", static_cast<int>(norm));
  }
}

v1::Norm ToProto(kernels::Norm norm) {
  switch (norm) {
    case kernels::Norm::kNone:
      return v1::NORM_NONE;
    case kernels::Norm::kLayerNorm:
      return v1::NORM_LAYERNORM;
    case kernels::Norm::kRmsNorm:
      return v1::NORM_RMSNORM;
  }
  return v1::NORM_UNSPECIFIED;
}

absl::StatusOr<kernels::OptimizerState> ToOptimizerState(v1::OptimizerState state, absl::string_view field) {
  switch (state) {
    case v1::OPTIMIZER_STATE_UNSPECIFIED:
    case v1::OPTIMIZER_STATE_ADAM:
      return kernels::OptimizerState::kAdam;
    case v1::OPTIMIZER_STATE_MOMENTUM:
      return kernels::OptimizerState::kMomentum;
    case v1::OPTIMIZER_STATE_NONE:
      return kernels::OptimizerState::kNone;
    default:
      return FieldError(field, "be a known OptimizerState", static_cast<int>(state));
  }
}

v1::OptimizerState ToProto(kernels::OptimizerState state) {
  switch (state) {
    case kernels::OptimizerState::kNone:
      return v1::OPTIMIZER_STATE_NONE;
    case kernels::OptimizerState::kMomentum:
      return v1::OPTIMIZER_STATE_MOMENTUM;
    case kernels::OptimizerState::kAdam:
      return v1::OPTIMIZER_STATE_ADAM;
  }
  return v1::OPTIMIZER_STATE_UNSPECIFIED;
}

absl::StatusOr<kernels::Logits> ToLogits(v1::Logits logits, absl::string_view field) {
  switch (logits) {
    case v1::LOGITS_UNSPECIFIED:
    case v1::LOGITS_STORED:
      return kernels::Logits::kStored;
    case v1::LOGITS_RECOMPUTED:
      return kernels::Logits::kRecomputed;
    default:
      return FieldError(field, "be LOGITS_STORED, LOGITS_RECOMPUTED or unspecified",
                        static_cast<int>(logits));
  }
}

v1::Logits ToProto(kernels::Logits logits) {
  switch (logits) {
    case kernels::Logits::kStored:
      return v1::LOGITS_STORED;
    case kernels::Logits::kRecomputed:
      return v1::LOGITS_RECOMPUTED;
  }
  return v1::LOGITS_UNSPECIFIED;
}

absl::StatusOr<kernels::Split> ToSplit(v1::Split split, absl::string_view field) {
  switch (split) {
    case v1::SPLIT_UNSPECIFIED:
      return kernels::Split::kAny;
    case v1::SPLIT_ROWS:
      return kernels::Split::kRows;
    case v1::SPLIT_VOCABULARY:
      return kernels::Split::kVocabulary;
    default:
      return FieldError(field, "be SPLIT_ROWS, SPLIT_VOCABULARY or unspecified", static_cast<int>(split));
  }
}

v1::Split ToProto(kernels::Split split) {
  switch (split) {
    case kernels::Split::kAny:
      return v1::SPLIT_UNSPECIFIED;
    case kernels::Split::kRows:
      return v1::SPLIT_ROWS;
    case kernels::Split::kVocabulary:
      return v1::SPLIT_VOCABULARY;
  }
  return v1::SPLIT_UNSPECIFIED;
}

absl::StatusOr<kernels::Gradients> ToGradients(v1::Gradients gradients, absl::string_view field) {
  switch (gradients) {
    case v1::GRADIENTS_UNSPECIFIED:
    case v1::GRADIENTS_EXACT:
      return kernels::Gradients::kExact;
    case v1::GRADIENTS_FILTERED:
      return kernels::Gradients::kFiltered;
    case v1::GRADIENTS_SAMPLED:
      return kernels::Gradients::kSampled;
    case v1::GRADIENTS_AUTO:
      return kernels::Gradients::kAuto;
    default:
      return FieldError(
          field, "be GRADIENTS_EXACT, GRADIENTS_FILTERED, GRADIENTS_SAMPLED, GRADIENTS_AUTO or unspecified",
          static_cast<int>(gradients));
  }
}

v1::Gradients ToProto(kernels::Gradients gradients) {
  switch (gradients) {
    case kernels::Gradients::kExact:
      return v1::GRADIENTS_EXACT;
    case kernels::Gradients::kFiltered:
      return v1::GRADIENTS_FILTERED;
    case kernels::Gradients::kSampled:
      return v1::GRADIENTS_SAMPLED;
    case kernels::Gradients::kAuto:
      return v1::GRADIENTS_AUTO;
  }
  return v1::GRADIENTS_UNSPECIFIED;
}

absl::StatusOr<kernels::Param> ToParam(v1::Param param, absl::string_view field) {
  switch (param) {
    case v1::PARAM_WEIGHT:
      return kernels::Param::kWeight;
    case v1::PARAM_BIAS:
      return kernels::Param::kBias;
    case v1::PARAM_NORM_GAIN:
      return kernels::Param::kNormGain;
    case v1::PARAM_NORM_SHIFT:
      return kernels::Param::kNormShift;
    case v1::PARAM_CLASS_WEIGHTS:
      return kernels::Param::kClassWeights;
    default:
      return FieldError(field, "be a known Param", static_cast<int>(param));
  }
}

absl::StatusOr<kernels::Role> ToRole(v1::Role role, absl::string_view field) {
  switch (role) {
    case v1::ROLE_UNSPECIFIED:
    case v1::ROLE_VALUE:
      return kernels::Role::kValue;
    case v1::ROLE_GRADIENT:
      return kernels::Role::kGradient;
    case v1::ROLE_MOMENT1:
      return kernels::Role::kMoment1;
    case v1::ROLE_MOMENT2:
      return kernels::Role::kMoment2;
    default:
      return FieldError(field, "be a known Role", static_cast<int>(role));
  }
}

absl::StatusOr<engine::Reduction> ToReduction(v1::Reduction reduction, absl::string_view field) {
  switch (reduction) {
    case v1::REDUCTION_SUM:
      return engine::Reduction::kSum;
    case v1::REDUCTION_MEAN:
      return engine::Reduction::kMean;
    case v1::REDUCTION_NONE:
      return engine::Reduction::kNone;
    default:
      return FieldError(field, "be REDUCTION_SUM, REDUCTION_MEAN or REDUCTION_NONE",
                        static_cast<int>(reduction));
  }
}

}  // namespace lossd::messages
