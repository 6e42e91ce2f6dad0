// SPDX-License-Identifier: Apache-2.0
// Conversions of messages and enums of lossd.v1 into the structs and enums of engine and kernels, and back.
//
// The functions check what can be checked with the message alone: unknown enum values, numbers out of a
// type's range, counts that disagree, hyper-parameters out of range. They refuse these with INVALID_ARGUMENT;
// the error's detail has the field's path and value. The engine checks what depends on a head or a step.
//
// Other functions check texts that clients choose and people read (names of runs, ids of calls). WithDetail
// adds an ErrorDetail of the protocol to an error.
//
// All functions are stateless and thread-safe.
#ifndef LOSSD_SERVER_MESSAGES_CONVERT_H_
#define LOSSD_SERVER_MESSAGES_CONVERT_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/backend.h"
#include "kernels/head_config.h"
#include "lossd/v1/head.pb.h"
#include "lossd/v1/loss.pb.h"
#include "lossd/v1/types.pb.h"
#include "server/engine/engine.h"
#include "server/engine/stream.h"

namespace lossd::messages {

// ---- Texts and errors ----

// INVALID_ARGUMENT, naming the field, unless `text` has `least` to `most` printable characters: UTF-8 without
// control characters, line breaks, and characters that hide text or change its direction.
absl::Status CheckText(absl::string_view field, absl::string_view text, int least, int most);

// Checks the name of a run: at most 128 characters; may be empty.
absl::Status CheckRun(absl::string_view field, absl::string_view run);
// Checks the id of a call that must have effect only once: 1 to 64 characters.
absl::Status CheckCallId(absl::string_view field, absl::string_view id);

// FAILED_PRECONDITION if a request names the incarnation `meant` and this server process has `own`.
absl::Status CheckIncarnation(absl::string_view field, uint64_t meant, uint64_t own);

// Returns `status`, which is not OK, with an ErrorDetail attached: the field and value, the open step and the
// missing rows, if the error has them, and the server's incarnation. Only this function makes a
// lossd.v1.ErrorDetail. It reads the data that errors carry for programs (kernels/errors/field_error.h,
// server/engine/errors.h).
absl::Status WithDetail(absl::Status status, uint64_t incarnation);

// ---- Messages ----

// Checks a name: 1 to 64 characters out of A-Z a-z 0-9 . _ -, not starting with a dot, so safe as a file
// name.
absl::Status CheckName(absl::string_view field, absl::string_view name);

// `range` must have begin <= end <= limit.
absl::StatusOr<engine::RowRange> ToRowRange(const v1::RowRange& range, absl::string_view field,
                                            int64_t limit);
absl::StatusOr<kernels::TensorId> ToTensorId(v1::Param param, v1::Role role, absl::string_view field_prefix);
// Converts to HeadConfig::shares. The backend checks whether the shares fit its devices.
absl::StatusOr<std::vector<int32_t>> ToShares(const google::protobuf::RepeatedField<uint32_t>& shares,
                                              absl::string_view field);
absl::StatusOr<kernels::HeadConfig> ToHeadConfig(const v1::HeadSpec& spec, absl::string_view field_prefix,
                                                 kernels::DType default_compute_dtype);
absl::StatusOr<kernels::OptimizerOptions> ToOptimizerOptions(const v1::Optimizer& optimizer,
                                                             absl::string_view field_prefix);
absl::StatusOr<engine::StepRequest> ToStepRequest(const v1::ApplyStepRequest& request);
// Makes the checks of options that ToStreamSpec makes; fields are named "<field>".
absl::Status CheckLossOptions(const v1::LossOptions& options);
// Fields are named "open.<field>" in errors.
absl::StatusOr<engine::StreamSpec> ToStreamSpec(const v1::OpenMicrobatch& open);
// Fields are named "backward.<field>" in errors.
absl::StatusOr<engine::BackwardSpec> ToBackwardSpec(const v1::OpenBackward& backward);

// Fields are named "open.<field>" in errors.
absl::StatusOr<engine::ContributionSpec> ToContributionSpec(const v1::OpenGradient& open);

v1::HeadSpec ToProto(const std::string& head, const kernels::HeadConfig& config);
v1::HeadState ToProto(const engine::HeadState& state);
v1::RowRange ToProto(const engine::RowRange& rows);
v1::SliceLimits ToProto(const engine::SliceLimits& limits);
v1::MemoryUsage ToProto(const kernels::MemoryBytes& memory);
v1::Choice ToProto(const kernels::Choice& choice);
v1::HeadDescription ToProto(const engine::HeadSnapshot& head);
v1::DepthSummary ToProto(const engine::DepthSummary& depth);
v1::MicrobatchSummary ToProto(const engine::StreamSummary& summary);
// Everything except the gradient, which is the payload.
v1::SliceResult ToProto(const engine::SliceOutput& output);

// The functions below convert enums. They refuse unknown values with INVALID_ARGUMENT, whose detail names
// `field`. They also refuse UNSPECIFIED, unless a comment says what it stands for.

absl::StatusOr<kernels::DType> ToDType(v1::DType dtype, absl::string_view field);
// UNSPECIFIED stands for `fallback`.
absl::StatusOr<kernels::DType> ToDType(v1::DType dtype, absl::string_view field, kernels::DType fallback);
v1::DType ToProto(kernels::DType dtype);

// UNSPECIFIED stands for no norm.
absl::StatusOr<kernels::Norm> ToNorm(v1::Norm norm, absl::string_view field);
v1::Norm ToProto(kernels::Norm norm);

// UNSPECIFIED stands for the state of Adam.
absl::StatusOr<kernels::OptimizerState> ToOptimizerState(v1::OptimizerState state, absl::string_view field);
v1::OptimizerState ToProto(kernels::OptimizerState state);

// UNSPECIFIED stands for stored logits.
absl::StatusOr<kernels::Logits> ToLogits(v1::Logits logits, absl::string_view field);
v1::Logits ToProto(kernels::Logits logits);
// UNSPECIFIED stands for Split::kAny.
absl::StatusOr<kernels::Split> ToSplit(v1::Split split, absl::string_view field);
v1::Split ToProto(kernels::Split split);

// UNSPECIFIED stands for exact gradients.
absl::StatusOr<kernels::Gradients> ToGradients(v1::Gradients gradients, absl::string_view field);
v1::Gradients ToProto(kernels::Gradients gradients);

// Also refuses UNSPECIFIED.
absl::StatusOr<kernels::Divergence> ToDivergence(v1::Divergence divergence, absl::string_view field);

absl::StatusOr<kernels::Param> ToParam(v1::Param param, absl::string_view field);
// UNSPECIFIED stands for the value.
absl::StatusOr<kernels::Role> ToRole(v1::Role role, absl::string_view field);

// UNSPECIFIED stands for Embedding::kNone: the rows have a loss.
absl::StatusOr<kernels::Embedding> ToEmbedding(v1::Embedding embedding);
absl::StatusOr<engine::Reduction> ToReduction(v1::Reduction reduction, absl::string_view field);

}  // namespace lossd::messages

#endif  // LOSSD_SERVER_MESSAGES_CONVERT_H_
