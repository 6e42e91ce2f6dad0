// SPDX-License-Identifier: Apache-2.0
// Enums of lossd.v1 to and from those of engine and kernels.
//
// A value that is not known, or is UNSPECIFIED where nothing says what that means, is refused with
// INVALID_ARGUMENT, whose detail names `field`. All functions are stateless and thread-safe.
#ifndef LOSSD_SERVER_MESSAGES_ENUMS_H_
#define LOSSD_SERVER_MESSAGES_ENUMS_H_

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/dtype.h"
#include "kernels/head_config.h"
#include "kernels/loss_options.h"
#include "kernels/optimizer_options.h"
#include "lossd/v1/head.pb.h"
#include "lossd/v1/loss.pb.h"
#include "lossd/v1/types.pb.h"
#include "server/engine/stream.h"

namespace lossd::messages {

absl::StatusOr<kernels::DType> ToDType(v1::DType dtype, absl::string_view field);
// Unspecified: `fallback`.
absl::StatusOr<kernels::DType> ToDType(v1::DType dtype, absl::string_view field, kernels::DType fallback);
v1::DType ToProto(kernels::DType dtype);

// Unspecified: none.
absl::StatusOr<kernels::Norm> ToNorm(v1::Norm norm, absl::string_view field);
v1::Norm ToProto(kernels::Norm norm);

// Unspecified: Adam's.
absl::StatusOr<kernels::OptimizerState> ToOptimizerState(v1::OptimizerState state, absl::string_view field);
v1::OptimizerState ToProto(kernels::OptimizerState state);

// Unspecified: stored.
absl::StatusOr<kernels::Logits> ToLogits(v1::Logits logits, absl::string_view field);
v1::Logits ToProto(kernels::Logits logits);
absl::StatusOr<kernels::Split> ToSplit(v1::Split split, absl::string_view field);
v1::Split ToProto(kernels::Split split);

// Unspecified: exact.
absl::StatusOr<kernels::Gradients> ToGradients(v1::Gradients gradients, absl::string_view field);
v1::Gradients ToProto(kernels::Gradients gradients);

absl::StatusOr<kernels::Param> ToParam(v1::Param param, absl::string_view field);
// Unspecified: the value.
absl::StatusOr<kernels::Role> ToRole(v1::Role role, absl::string_view field);

absl::StatusOr<engine::Reduction> ToReduction(v1::Reduction reduction, absl::string_view field);

}  // namespace lossd::messages

#endif  // LOSSD_SERVER_MESSAGES_ENUMS_H_
