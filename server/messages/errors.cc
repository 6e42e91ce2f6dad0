// SPDX-License-Identifier: Apache-2.0
#include "server/messages/errors.h"

#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"
#include "lossd/v1/types.pb.h"
#include "proto/wire/status_details.h"
#include "server/engine/errors.h"

namespace lossd::messages {

absl::Status CheckIncarnation(absl::string_view field, uint64_t meant, uint64_t own) {
  if (meant == own) return absl::OkStatus();
  return errors::FieldError(
      field, absl::StrCat("be that of this server process, ", absl::Hex(own, absl::kZeroPad16)),
      absl::Hex(meant, absl::kZeroPad16), absl::StatusCode::kFailedPrecondition);
}

absl::Status WithDetail(absl::Status status, uint64_t incarnation) {
  v1::ErrorDetail detail;
  detail.set_incarnation(incarnation);
  if (std::optional<errors::FieldViolation> violation = errors::GetFieldViolation(status)) {
    detail.set_field(std::move(violation->field));
    detail.set_value(std::move(violation->value));
  }
  if (const std::optional<uint64_t> step = engine::GetCurrentStep(status)) detail.set_current_step(*step);
  for (std::string& line : engine::GetMissing(status)) detail.add_missing(std::move(line));
  wire::SetErrorDetail(detail, &status);
  return status;
}

}  // namespace lossd::messages
