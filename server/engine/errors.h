// SPDX-License-Identifier: Apache-2.0
// The functions here make the engine's errors. An error names the field at fault
// (kernels/errors/field_error.h); some errors carry more for programs: the step that is open, or what a step
// misses. server/messages turns all of it into lossd.v1.ErrorDetail.
//
// Fields have the paths that they have in requests: "open.rows", "slice.rows", "backward.step". Those of
// other requests have the bare name ("step", "head"), to which the caller adds the path if there is one.
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

// "[3, 7)".
std::string Text(RowRange rows);

// errors::FieldProblem by other names: "<field> <problem>, got <value>", e.g.
// InvalidField("slice.rows", "must be a non-empty range", "[3, 3)").
absl::Status FieldError(absl::StatusCode code, absl::string_view field, absl::string_view problem,
                        absl::string_view value);
absl::Status InvalidField(absl::string_view field, absl::string_view problem, absl::string_view value);

// NOT_FOUND for the field "head": there is no head of this name.
absl::Status UnknownHead(absl::string_view name);

// FAILED_PRECONDITION: `step` was named but `current` is open, which is attached as the current step. `why`:
// what is known of how that came.
absl::Status StepNotOpen(absl::string_view field, uint64_t step, uint64_t current, absl::string_view why);

// ABORTED: generation `named` was named but the head's gradients are those of `current`, or were in the step
// applied.
absl::Status OtherGeneration(absl::string_view field, uint64_t named, uint64_t current);

// FAILED_PRECONDITION if an incarnation is named that is not `own`, that of the engine with the step's rows.
absl::Status CheckIncarnation(std::optional<uint64_t> named, uint64_t own);

// UNAVAILABLE.
absl::Status ShuttingDown();

// OUT_OF_RANGE: the loss of a row of a microbatch, or its gradient, is not finite. `some_accumulated`: rows
// of its slice may have been accumulated nevertheless, because slices of other calls hold rows of it, too.
absl::Status RowNotFinite(int64_t row, bool some_accumulated);

// INTERNAL: a chunk got no results.
absl::Status DeviceFailed(const absl::Status& status);

// `status` with the head's open step; an OK status stays OK.
absl::Status WithCurrentStep(absl::Status status, uint64_t step);
std::optional<uint64_t> GetCurrentStep(const absl::Status& status);

// `status` with what a step misses, a line each, e.g. "microbatch 7: rows [128, 256) of 512"; an OK status
// stays OK.
absl::Status WithMissing(absl::Status status, const std::vector<std::string>& lines);
// Empty if nothing was attached.
std::vector<std::string> GetMissing(const absl::Status& status);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_ERRORS_H_
