// SPDX-License-Identifier: Apache-2.0
// The texts of the engine's errors, and the payloads of absl::Status that carry data for programs (errors.h).
#include "server/engine/errors.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"

namespace lossd::engine {
namespace {

constexpr absl::string_view kCurrentStepPayload = "lossd/current-step";
constexpr absl::string_view kMissingPayload = "lossd/missing";

}  // namespace

std::string Text(RowRange rows) { return absl::StrCat("[", rows.begin, ", ", rows.end, ")"); }

absl::Status FieldError(absl::StatusCode code, absl::string_view field, absl::string_view problem,
                        absl::string_view value) {
  return errors::FieldProblem(field, problem, value, code);
}

absl::Status InvalidField(absl::string_view field, absl::string_view problem, absl::string_view value) {
  return errors::FieldProblem(field, problem, value);
}

absl::Status UnknownHead(absl::string_view name) {
  return errors::FieldError("head", "name a head of this server", name, absl::StatusCode::kNotFound);
}

absl::Status StepNotOpen(absl::string_view field, uint64_t step, uint64_t current, absl::string_view why) {
  const absl::Status status =
      errors::FieldProblem(field, absl::StrCat("is not the open step, which is ", current), step,
                           absl::StatusCode::kFailedPrecondition);
  return WithCurrentStep(errors::WithMessage(status, absl::StrCat(status.message(), "; ", why)), current);
}

absl::Status OtherGeneration(absl::string_view field, uint64_t named, uint64_t current) {
  return errors::FieldProblem(
      field,
      absl::StrCat(
          "is not that of the head's gradients, ", current,
          " (they were zeroed, applied, or discarded by a reset or by a checkpoint that was loaded)"),
      named, absl::StatusCode::kAborted);
}

absl::Status CheckIncarnation(std::optional<uint64_t> named, uint64_t own) {
  if (named.value_or(own) == own) return absl::OkStatus();
  return FieldError(absl::StatusCode::kFailedPrecondition, "incarnation",
                    absl::StrCat("must be that of the server process that has the step's rows, ",
                                 absl::Hex(own, absl::kZeroPad16)),
                    absl::StrCat(absl::Hex(*named, absl::kZeroPad16)));
}

absl::Status ShuttingDown() { return absl::UnavailableError("the server is shutting down"); }

absl::Status RowNotFinite(int64_t row, bool some_accumulated) {
  return FieldError(
      absl::StatusCode::kOutOfRange, absl::StrCat("row ", row),
      some_accumulated ? "must have a finite loss and gradient; rows of its slice may have been accumulated, "
                         "because other calls sent some of them, too (zero the step, or send "
                         "the slice again)"
                       : "must have a finite loss and gradient; nothing of its slice was accumulated",
      "a loss that is not finite, or a gradient of the hidden state that is not");
}

absl::Status DeviceFailed(const absl::Status& status) {
  if (absl::IsDataLoss(status)) {
    return absl::InternalError(absl::StrCat(
        "the gradients of the step are lost (zero the gradients and repeat the step): ", status.message()));
  }
  return absl::InternalError(
      absl::StrCat("the device failed; nothing of this slice was accumulated: ", status.message()));
}

absl::Status WithCurrentStep(absl::Status status, uint64_t step) {
  const std::string text[] = {absl::StrCat(step)};
  errors::SetTexts(kCurrentStepPayload, text, &status);
  return status;
}

std::optional<uint64_t> GetCurrentStep(const absl::Status& status) {
  const std::optional<std::vector<std::string>> texts = errors::GetTexts(kCurrentStepPayload, status);
  uint64_t step = 0;
  if (!texts.has_value() || texts->size() != 1 || !absl::SimpleAtoi(texts->front(), &step))
    return std::nullopt;
  return step;
}

absl::Status WithMissing(absl::Status status, const std::vector<std::string>& lines) {
  errors::SetTexts(kMissingPayload, lines, &status);
  return status;
}

std::vector<std::string> GetMissing(const absl::Status& status) {
  return errors::GetTexts(kMissingPayload, status).value_or(std::vector<std::string>());
}

}  // namespace lossd::engine
