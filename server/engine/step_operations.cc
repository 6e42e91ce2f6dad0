// SPDX-License-Identifier: Apache-2.0
#include "server/engine/step_operations.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "kernels/validation.h"
#include "server/engine/errors.h"

namespace lossd::engine {
namespace {

absl::Status NormNotFinite(double norm) {
  return FieldError(absl::StatusCode::kFailedPrecondition, "skip_non_finite",
                    "must be set to close a step whose gradient norm is not finite (nothing changed)",
                    absl::StrCat("a norm of ", norm));
}

// A frozen head has no gradients. The device would refuse too, which must not pass for a failure of the
// device.
absl::Status CheckTrained(const HeadSession& session) {
  if (session.config().trainable) return absl::OkStatus();
  return FieldError(absl::StatusCode::kFailedPrecondition, "head", "must not be frozen", session.name());
}

// If it fails, some gradients are gone although the ledger knows them.
absl::Status ClearGradients(HeadSession& session) {
  absl::Status status = session.head().kernels().ZeroGradients();
  if (status.ok()) return status;
  session.context().observers.Tell(&EngineObserver::OnDeviceError, status);
  absl::MutexLock lock(&session.context().mutex);
  OpenStep& step = session.step();
  step.MarkGradientsInvalid(absl::InternalError(
      absl::StrCat("the device failed while zeroing the gradients of head ", session.name(), " at step ",
                   step.number(), "; they are not to be trusted (zero them again): ", status.message())));
  return step.gradients_status();
}

// A device that fails half-way through an update leaves weights that are neither the old nor the new ones.
absl::Status UpdateFailed(HeadSession& session, const absl::Status& status) {
  if (absl::IsInvalidArgument(status) || absl::IsFailedPrecondition(status)) return status;
  session.context().observers.Tell(&EngineObserver::OnDeviceError, status);
  absl::MutexLock lock(&session.context().mutex);
  absl::Status why = absl::InternalError(absl::StrCat(
      "the device failed while applying step ", session.step().number(), " to head ", session.name(),
      "; its weights are not to be trusted (load a checkpoint): ", status.message()));
  session.MarkWeightsInvalid(why);
  return why;
}

absl::StatusOr<double> NormOnDevice(HeadSession& session) {
  absl::StatusOr<double> norm = session.head().kernels().GradNorm();
  if (norm.ok()) return norm;
  return session.context().NoteIfLost(norm.status());
}

// Updates the weights, or zeroes the gradients if `skip`.
absl::Status Update(HeadSession& session, const kernels::OptimizerOptions& optimizer, int64_t update,
                    bool skip) {
  if (skip) return ClearGradients(session);
  const absl::Status applied = session.head().kernels().ApplyStep(optimizer, update);
  return applied.ok() ? applied : UpdateFailed(session, applied);
}

}  // namespace

absl::StatusOr<GradNormResult> GradNorm(HeadSession& session, std::optional<uint64_t> step) {
  if (auto trained = CheckTrained(session); !trained.ok()) return trained;
  GradNormResult result;
  {
    absl::MutexLock lock(&session.context().mutex);
    const OpenStep& open = session.step();
    if (step.has_value() && *step != open.number()) return StepNotOpen("step", *step, open.number());
    if (auto valid = open.CheckValid(); !valid.ok()) return valid;
    result.state = open.state();
  }
  const absl::StatusOr<double> norm = NormOnDevice(session);
  if (!norm.ok()) return norm.status();
  result.grad_norm = *norm;
  return result;
}

absl::StatusOr<StepResult> ApplyStep(HeadSession& session, const StepRequest& request) {
  absl::Mutex& mutex = session.context().mutex;
  OpenStep& step = session.step();
  int64_t update = 0;
  {
    absl::MutexLock lock(&mutex);
    if (step.last().IsRepeat(request)) {
      if (auto same = step.last().CheckRepeat(request); !same.ok()) return same;
      StepResult result = step.last().Result(step.state());
      result.repeated = true;
      return result;
    }
    auto complete = step.CheckComplete(request, session.schedule().backlog().waits_for);
    if (!complete.ok()) return complete;
    update = static_cast<int64_t>(step.updates()) + 1;
  }
  auto valid = kernels::ValidateStep(session.config(), request.optimizer, update);
  if (!valid.ok()) return valid;
  const absl::StatusOr<double> norm = NormOnDevice(session);
  if (!norm.ok()) return norm.status();
  const bool skip = !std::isfinite(*norm);
  if (skip && !request.skip_non_finite) return NormNotFinite(*norm);
  {
    absl::MutexLock lock(&mutex);
    step.BeginClose();
  }
  const absl::Status updated = Update(session, request.optimizer, update, skip);
  absl::MutexLock lock(&mutex);
  if (!updated.ok()) {
    step.CancelClose();
    return updated;
  }
  session.EnterStep([&](OpenStep& open) { open.Close(request.optimizer, *norm, skip); });
  return step.last().Result(step.state());
}

absl::StatusOr<HeadState> ZeroGradients(HeadSession& session, uint64_t step) {
  if (auto trained = CheckTrained(session); !trained.ok()) return trained;
  {
    absl::MutexLock lock(&session.context().mutex);
    const uint64_t open = session.step().number();
    if (step != open) return StepNotOpen("step", step, open);
  }
  if (auto status = ClearGradients(session); !status.ok()) return status;
  absl::MutexLock lock(&session.context().mutex);
  session.EnterStep([](OpenStep& open) { open.Restart(); });
  return session.step().state();
}

absl::Status BeginLoad(HeadSession& session, const head::Progress& progress,
                       const std::optional<head::AppliedStep>& last_step) {
  if (session.config().trainable) {
    if (auto status = ClearGradients(session); !status.ok()) return status;
  }
  absl::MutexLock lock(&session.context().mutex);
  const absl::Status loading = absl::UnavailableError(
      absl::StrCat("the weights of head ", session.name(),
                   " are being replaced by a checkpoint's, or that failed half-way (load "
                   "one again)"));
  session.EnterStep([&](OpenStep& open) { open.BeginLoad(progress, last_step, loading); });
  return absl::OkStatus();
}

absl::Status EndLoad(HeadSession& session) {
  absl::MutexLock lock(&session.context().mutex);
  session.step().EndLoad();
  return absl::OkStatus();
}

}  // namespace lossd::engine
