// SPDX-License-Identifier: Apache-2.0
// Functions that make the engine's errors. An error names the field at fault (kernels/errors/field_error.h).
// Some errors also carry data for programs: the step that is open, or the rows that a step misses.
// server/messages turns all of it into lossd.v1.ErrorDetail.
//
// A field is named by its path in the request: "open.rows", "slice.rows", "backward.step". Fields of other
// requests have the bare name ("step", "head"), and the caller puts a path before it if there is one.
//
// All functions are stateless and thread-safe.
#ifndef LOSSD_SERVER_ENGINE_ERRORS_H_
#define LOSSD_SERVER_ENGINE_ERRORS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/engine/stream.h"

namespace lossd::engine {

// The range as text, e.g. "[3, 7)".
std::string Text(RowRange rows);

// Both are short forms of errors::FieldProblem and say "<field> <problem>, got <value>"; InvalidField is
// INVALID_ARGUMENT. E.g. InvalidField("slice.rows", "must be a non-empty range", "[3, 3)").
absl::Status FieldError(absl::StatusCode code, absl::string_view field, absl::string_view problem,
                        absl::string_view value);
absl::Status InvalidField(absl::string_view field, absl::string_view problem, absl::string_view value);

// NOT_FOUND for the field "head": there is no head of this name.
absl::Status UnknownHead(absl::string_view name);

// FAILED_PRECONDITION: a call named `step`, but `current` is open; `current` is attached as the current step.
// `why` is text: what is known of the reason.
absl::Status StepNotOpen(absl::string_view field, uint64_t step, uint64_t current, absl::string_view why);

// ABORTED: a call named generation `named`, but the generation of the head's gradients, or of the step that
// was applied, is `current`.
absl::Status OtherGeneration(absl::string_view field, uint64_t named, uint64_t current);

// FAILED_PRECONDITION if the call named an incarnation other than `own`, the incarnation of the engine that
// has the step's rows.
absl::Status CheckIncarnation(std::optional<uint64_t> named, uint64_t own);

// UNAVAILABLE.
absl::Status ShuttingDown();

// OUT_OF_RANGE: the loss or the gradient of a row of a microbatch is not finite. `some_accumulated`: some
// rows of its slice may have been accumulated nevertheless, because other calls sent them, too.
absl::Status RowNotFinite(int64_t row, bool some_accumulated);

// INTERNAL: a chunk got no results, for the reason `status`.
absl::Status DeviceFailed(const absl::Status& status);

// WithCurrentStep returns `status` with the number of the head's open step attached; an OK status stays OK.
// GetCurrentStep returns the number that was attached.
absl::Status WithCurrentStep(absl::Status status, uint64_t step);
std::optional<uint64_t> GetCurrentStep(const absl::Status& status);

// Returns `status` with lines attached that say what a step misses, e.g. "microbatch 7: rows [128, 256) of
// 512"; an OK status stays OK.
absl::Status WithMissing(absl::Status status, const std::vector<std::string>& lines);
// The lines that WithMissing attached; empty if there are none.
std::vector<std::string> GetMissing(const absl::Status& status);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_ERRORS_H_
