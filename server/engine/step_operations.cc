// SPDX-License-Identifier: Apache-2.0
#include "server/engine/step_operations.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "kernels/validation.h"
#include "server/engine/errors.h"
#include "server/engine/update_bounds.h"

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

// A device that fails half-way leaves weights or moments that are neither the old nor the new ones. `what` it
// did, e.g. "applying step 3 to".
absl::Status TensorsFailed(HeadSession& session, absl::string_view what, const absl::Status& status) {
  session.context().observers.Tell(&EngineObserver::OnDeviceError, status);
  absl::MutexLock lock(&session.context().mutex);
  absl::Status why = absl::InternalError(absl::StrCat(
      "the device failed while ", what, " head ", session.name(),
      "; its weights are not to be trusted (load a checkpoint, or reset the head): ", status.message()));
  session.MarkWeightsInvalid(why);
  return why;
}

absl::Status ClearMoments(HeadSession& session) {
  ForgetWritten(session.head(), &session.magnitudes);
  const absl::Status status = session.head().kernels().ZeroMoments();
  if (!status.ok()) return TensorsFailed(session, "zeroing the optimizer's state of", status);
  session.magnitudes.moment1 = session.magnitudes.moment2 = 0.0;
  return status;
}

absl::StatusOr<double> NormOnDevice(HeadSession& session) {
  absl::StatusOr<double> norm = session.head().kernels().GradNorm();
  if (norm.ok()) return norm;
  return session.context().NoteIfLost(norm.status());
}

// Updates the weights, or zeroes the gradients if `skip`; with moments that are zero before if the request
// says so.
absl::Status Update(HeadSession& session, const StepRequest& request, int64_t update, bool skip) {
  if (skip) {
    const absl::Status cleared = ClearGradients(session);
    return cleared.ok() && request.begin_optimizer ? ClearMoments(session) : cleared;
  }
  if (request.begin_optimizer) {
    if (absl::Status begun = ClearMoments(session); !begun.ok()) return begun;
  }
  const absl::Status applied = session.head().kernels().ApplyStep(request.optimizer, update);
  if (applied.ok()) return applied;
  const bool unchanged = absl::IsInvalidArgument(applied) || absl::IsFailedPrecondition(applied);
  if (unchanged && !request.begin_optimizer) return applied;
  return TensorsFailed(session, absl::StrCat("applying step ", request.step, " to"), applied);
}

absl::StatusOr<Measurement> MeasureHead(HeadSession& session) {
  absl::StatusOr<Measurement> measured = Measure(session.head());
  if (measured.ok()) return measured;
  return session.context().NoteIfLost(measured.status());
}

// What an update will do.
struct PlannedUpdate {
  Reach reach;
  int64_t not_finite = 0;  // before an update that may do anything
};

// Fails if the update is refused. Reads what the head holds if the outcome depends on it and it is not known.
absl::StatusOr<PlannedUpdate> PlanUpdate(HeadSession& session, const StepRequest& request, int64_t update,
                                         double norm) {
  const auto reach_from = [&](Magnitudes before) {
    if (request.begin_optimizer) before.moment1 = before.moment2 = 0.0;
    return CheckReach(request.optimizer, update, norm, before);
  };
  ForgetWritten(session.head(), &session.magnitudes);
  absl::StatusOr<Reach> reach = reach_from(session.magnitudes);
  if (!reach.ok()) return reach.status();
  if (reach->reach == UpdateReach::kBounded) return PlannedUpdate{.reach = *reach};
  const absl::StatusOr<Measurement> measured = MeasureHead(session);
  if (!measured.ok()) return measured.status();
  session.magnitudes = measured->most;
  if (auto harmless = CheckDecay(request.optimizer, measured->most); !harmless.ok()) return harmless;
  reach = reach_from(measured->most);
  if (!reach.ok()) return reach.status();
  return PlannedUpdate{.reach = *reach, .not_finite = measured->not_finite};
}

// After an update that may have done anything. If it has made values infinite or NaN, the head is not to be
// used any more: what was there is gone.
absl::Status CheckFinite(HeadSession& session, const StepRequest& request, int64_t not_finite_before) {
  const absl::StatusOr<Measurement> measured = MeasureHead(session);
  if (!measured.ok()) return TensorsFailed(session, "reading the weights of", measured.status());
  session.magnitudes = measured->most;
  const int64_t more = measured->not_finite - not_finite_before;
  if (more <= 0) return absl::OkStatus();
  session.context().observers.Tell(&EngineObserver::OnStep,
                                   {.head = session.name(), .step = request.step, .made_not_finite = more});
  absl::MutexLock lock(&session.context().mutex);
  absl::Status why = absl::FailedPreconditionError(absl::StrCat(
      "step ", request.step, " of head ", session.name(), " was applied with a learning rate of ",
      request.optimizer.learning_rate, ", a weight decay of ", request.optimizer.weight_decay,
      " and a multiplier of ", request.optimizer.grad_multiplier, ", and ", more,
      " values are not finite any more (load a checkpoint, or reset the head)"));
  session.MarkWeightsInvalid(why);
  return why;
}

// With the lock: a head is not reset while a client is sending rows into its gradients.
absl::Status CheckNothingOpen(HeadSession& session) {
  const int64_t streams = session.streams().accumulating();
  const int64_t contributions = *session.streams().contributions();
  if (streams == 0 && contributions == 0) return absl::OkStatus();
  const auto calls = [](int64_t count, absl::string_view kind) {
    return count == 0 ? "" : absl::StrCat(count, " open ", kind, count == 1 ? " call" : " calls");
  };
  return absl::FailedPreconditionError(
      absl::StrCat("head ", session.name(), " has ", calls(streams, "accumulating ComputeLoss"),
                   streams > 0 && contributions > 0 ? " and " : "", calls(contributions, "AddGradient"),
                   "; it is reset when they have ended (nothing changed)"));
}

}  // namespace

absl::Status OrderExpected(const EngineOptions& options, StepRequest& request) {
  std::vector<uint64_t>& ids = request.expected_microbatches;
  // A step has at most so many microbatches, and as many contributions.
  const int64_t most = 2 * options.max_step_microbatches;
  if (static_cast<int64_t>(ids.size()) > most) {
    return InvalidField("expected_microbatches.size",
                        absl::StrCat("must be at most ", most, ", as many as a step may have"),
                        absl::StrCat(ids.size()));
  }
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return absl::OkStatus();
}

absl::StatusOr<GradNormResult> GradNorm(HeadSession& session, std::optional<uint64_t> step,
                                        absl::string_view run) {
  if (auto trained = CheckTrained(session); !trained.ok()) return trained;
  GradNormResult result;
  {
    absl::MutexLock lock(&session.context().mutex);
    const OpenStep& open = session.step();
    const NamedStep named{.step = step.value_or(open.number()), .run = run};
    if (auto meant = open.CheckNumber("step", named, session.context().runtime->WallNow()); !meant.ok())
      return meant;
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
    auto complete = step.CheckComplete(request, session.schedule().backlog().waits_for,
                                       session.context().runtime->WallNow());
    if (!complete.ok()) return complete;
    update = request.begin_optimizer ? 1 : static_cast<int64_t>(step.updates()) + 1;
  }
  auto valid = kernels::ValidateStep(session.config(), request.optimizer, update);
  if (!valid.ok()) return valid;
  if (auto fits = CheckOptionsFit(request.optimizer, update); !fits.ok()) return fits;
  const absl::StatusOr<double> norm = NormOnDevice(session);
  if (!norm.ok()) return norm.status();
  const bool skip = !std::isfinite(*norm);
  if (skip && !request.skip_non_finite) return NormNotFinite(*norm);
  absl::StatusOr<PlannedUpdate> planned = PlannedUpdate{};
  if (!skip) planned = PlanUpdate(session, request, update, *norm);
  if (!planned.ok()) return planned.status();
  {
    absl::MutexLock lock(&mutex);
    step.BeginClose();
  }
  absl::Status updated = Update(session, request, update, skip);
  if (updated.ok() && !skip) {
    if (planned->reach.reach == UpdateReach::kUnknown) {
      updated = CheckFinite(session, request, planned->not_finite);
    } else {
      session.magnitudes = planned->reach.after;
    }
  }
  absl::MutexLock lock(&mutex);
  if (!updated.ok()) {
    step.CancelClose();
    return updated;
  }
  session.EnterStep(
      [&](OpenStep& open) { open.Close(request, *norm, skip, session.context().runtime->WallNow()); });
  return step.last().Result(step.state());
}

absl::StatusOr<HeadState> ZeroGradients(HeadSession& session, uint64_t step, absl::string_view run) {
  if (auto trained = CheckTrained(session); !trained.ok()) return trained;
  {
    absl::MutexLock lock(&session.context().mutex);
    const NamedStep named{.step = step, .run = run};
    auto open = session.step().CheckNumber("step", named, session.context().runtime->WallNow());
    if (!open.ok()) return open;
  }
  if (auto status = ClearGradients(session); !status.ok()) return status;
  absl::MutexLock lock(&session.context().mutex);
  session.EnterStep([](OpenStep& open) { open.Restart(); });
  return session.step().state();
}

namespace {

// With the lock: shares change between steps, while nothing is under way on the head.
absl::Status CheckBetweenSteps(HeadSession& session) {
  OpenStep& step = session.step();
  const std::pair<int64_t, absl::string_view> all[] = {
      {session.streams().size(), "open ComputeLoss or Backward calls"},
      {*session.streams().contributions(), "open AddGradient calls"},
      {session.deferred().size(), "retained microbatches"},
      {step.ledger().accumulated_rows(), "accumulated rows"},
      {step.contributions().contributions(), "contributions"}};
  std::string what;
  for (const auto& [count, name] : all) {
    if (count > 0) absl::StrAppend(&what, what.empty() ? "" : ", ", name, ": ", count);
  }
  if (what.empty()) return step.CheckTensors();
  return absl::FailedPreconditionError(absl::StrCat("shares change between steps; at step ", step.number(),
                                                    " head ", session.name(), " has ", what,
                                                    " (nothing changed)"));
}

}  // namespace

absl::Status SetShares(HeadSession& session, const std::vector<int32_t>& shares) {
  {
    absl::MutexLock lock(&session.context().mutex);
    if (auto idle = CheckBetweenSteps(session); !idle.ok()) return idle;
  }
  return session.SetShares(shares);
}

absl::StatusOr<HeadState> Reset(HeadSession& session, ResetScope scope) {
  const bool all = scope == ResetScope::kAll;
  if (auto trained = CheckTrained(session); !all && !trained.ok()) return trained;
  {
    absl::MutexLock lock(&session.context().mutex);
    if (auto idle = CheckNothingOpen(session); !idle.ok()) return idle;
    if (auto usable = session.step().CheckTensors(); !all && !usable.ok()) return usable;
  }
  if (session.config().trainable) {
    if (auto status = ClearGradients(session); !status.ok()) return status;
    if (auto status = ClearMoments(session); !status.ok()) return status;
  }
  absl::MutexLock lock(&session.context().mutex);
  const absl::Status resetting = absl::UnavailableError(
      absl::StrCat("head ", session.name(), " is being reset, or that failed half-way (reset it again)"));
  session.EnterStep([&](OpenStep& open) {
    if (!all) return open.Restart(/*new_optimizer=*/true);
    open.BeginLoad({}, std::nullopt, std::nullopt, resetting, session.context().runtime->WallNow());
  });
  return session.step().state();
}

absl::Status BeginLoad(HeadSession& session, const head::Progress& progress,
                       const std::optional<head::AppliedStep>& last_step, const head::History& history) {
  if (session.config().trainable) {
    if (auto status = ClearGradients(session); !status.ok()) return status;
  }
  session.magnitudes = {.moment1 = Magnitudes::kUnknown, .moment2 = Magnitudes::kUnknown};
  absl::MutexLock lock(&session.context().mutex);
  const absl::Status loading = absl::UnavailableError(
      absl::StrCat("the weights of head ", session.name(),
                   " are being replaced by a checkpoint's, or that failed half-way (load "
                   "one again)"));
  session.EnterStep(
      [&](OpenStep& open) { open.BeginLoad(progress, last_step, history, loading, absl::UnixEpoch()); });
  return absl::OkStatus();
}

absl::Status EndLoad(HeadSession& session) {
  absl::MutexLock lock(&session.context().mutex);
  session.step().EndLoad();
  return absl::OkStatus();
}

}  // namespace lossd::engine
