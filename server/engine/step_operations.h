// SPDX-License-Identifier: Apache-2.0
// What is done to the open step of a head as a whole. Each function is the body of an operation: it runs on
// the device thread, without the engine's lock, while no chunk of the head is in flight; it checks under the
// lock, works on the device without it, and books under the lock. Only the device thread changes a step, so
// what was checked holds.
#ifndef LOSSD_SERVER_ENGINE_STEP_OPERATIONS_H_
#define LOSSD_SERVER_ENGINE_STEP_OPERATIONS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/engine/head_session.h"
#include "server/engine/step_request.h"

namespace lossd::engine {

// Checks the number of expected ids and puts them in order, which is much work for many. On any thread.
absl::Status OrderExpected(const EngineOptions& options, StepRequest& request);

// Each as the member of Engine with its name; the optimizer's options have been validated.
absl::StatusOr<GradNormResult> GradNorm(HeadSession& session, std::optional<uint64_t> step,
                                        absl::string_view run);
absl::StatusOr<StepResult> ApplyStep(HeadSession& session, const StepRequest& request);
absl::StatusOr<HeadState> ZeroGradients(HeadSession& session, uint64_t step, absl::string_view run);
absl::StatusOr<HeadState> Reset(HeadSession& session, ResetScope scope);
absl::Status SetShares(HeadSession& session, const std::vector<int32_t>& shares);
absl::Status BeginLoad(HeadSession& session, const head::Progress& progress,
                       const std::optional<head::AppliedStep>& last_step, const head::History& history);
absl::Status EndLoad(HeadSession& session);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_STEP_OPERATIONS_H_
