// Statuses that name the offending field and its value for programs as well as in the message. The rpc
// layer turns the payloads into lossd.v1.ErrorDetail.
#ifndef LOSSD_SERVER_ENGINE_ERRORS_H_
#define LOSSD_SERVER_ENGINE_ERRORS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/engine/stream.h"

namespace lossd::engine {

// Payload type URLs; each payload is plain text.
inline constexpr char kFieldPayload[] = "lossd/field";
inline constexpr char kValuePayload[] = "lossd/value";
inline constexpr char kCurrentStepPayload[] = "lossd/current_step";

// "[3, 7)".
inline std::string Text(RowRange rows) { return absl::StrCat("[", rows.begin, ", ", rows.end, ")"); }

// "<field> <problem>, got <value>", e.g. FieldError(kInvalidArgument, "slice.rows", "must ...", "[3, 3)").
inline absl::Status FieldError(absl::StatusCode code, absl::string_view field, absl::string_view problem,
                               absl::string_view value) {
  absl::Status status(code, absl::StrCat(field, " ", problem, ", got ", value));
  status.SetPayload(kFieldPayload, absl::Cord(field));
  status.SetPayload(kValuePayload, absl::Cord(value));
  return status;
}

inline absl::Status InvalidField(absl::string_view field, absl::string_view problem,
                                 absl::string_view value) {
  return FieldError(absl::StatusCode::kInvalidArgument, field, problem, value);
}

// FAILED_PRECONDITION: `step` was named but `current` is open.
inline absl::Status StepNotOpen(absl::string_view field, uint64_t step, uint64_t current) {
  absl::Status status =
      FieldError(absl::StatusCode::kFailedPrecondition, field,
                 absl::StrCat("is not the open step, which is ", current), absl::StrCat(step));
  status.SetPayload(kCurrentStepPayload, absl::Cord(absl::StrCat(current)));
  return status;
}

// OUT_OF_RANGE: the loss of a row of a microbatch is not finite.
inline absl::Status RowNotFinite(int64_t row) {
  return FieldError(absl::StatusCode::kOutOfRange, absl::StrCat("row ", row),
                    "must have a finite loss; nothing of its slice was accumulated",
                    "a loss that is not finite");
}

// INTERNAL: a chunk got no results.
inline absl::Status DeviceFailed(const absl::Status& status) {
  return absl::InternalError(
      absl::StrCat("the device failed; nothing of this slice was accumulated: ", status.message()));
}

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_ERRORS_H_
