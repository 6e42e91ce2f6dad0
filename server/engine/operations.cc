// SPDX-License-Identifier: Apache-2.0
// The operations on a head (operations.h), in the order of the header.
#include "server/engine/operations.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"
#include "kernels/validation.h"
#include "server/engine/errors.h"
#include "server/engine/head_session.h"

namespace lossd::engine {
namespace {

absl::Status NormNotFinite(double norm) {
  return FieldError(absl::StatusCode::kFailedPrecondition, "skip_non_finite",
                    "must be set to close a step whose gradient norm is not finite (nothing changed)",
                    absl::StrCat("a norm of ", norm));
}

// A frozen head has no gradients. The device would refuse, too, but that must not look like a failure of the
// device.
absl::Status CheckTrained(const HeadSession& session) {
  if (session.config().trainable) return absl::OkStatus();
  return FieldError(absl::StatusCode::kFailedPrecondition, "head", "must not be frozen", session.name());
}

// Zeroes the accumulated gradients. If it fails, some gradients are gone although the ledger counts their
// rows.
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

// Handles a device that failed half-way and left weights or moments that are neither old nor new. `what` it
// was doing, e.g. "applying step 3 to".
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

// Updates the weights, or only zeroes the gradients if `skip`. Zeroes the moments first if the request begins
// a new optimizer.
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
  // The backend refused the options before it began. (But the moments have been zeroed for a new optimizer.)
  const bool unchanged = absl::IsInvalidArgument(applied) || absl::IsFailedPrecondition(applied);
  if (unchanged && !request.begin_optimizer) return applied;
  return TensorsFailed(session, absl::StrCat("applying step ", request.step, " to"), applied);
}

absl::StatusOr<Measurement> MeasureHead(HeadSession& session) {
  absl::StatusOr<Measurement> measured = Measure(session.head());
  if (measured.ok()) return measured;
  return session.context().NoteIfLost(measured.status());
}

// What is known of an update before it is made.
struct PlannedUpdate {
  Reach reach;
  NotFinite not_finite;  // before the update; set if its reach is unknown
};

// Fails if the update is refused. Reads the head's tensors if the outcome depends on magnitudes that are not
// known.
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
  LOSSD_RETURN_IF_ERROR(CheckDecay(request.optimizer, measured->most));
  reach = reach_from(measured->most);
  if (!reach.ok()) return reach.status();
  return PlannedUpdate{.reach = *reach, .not_finite = measured->not_finite};
}

// Checks the tensors after an update whose reach was unknown. If the update made values infinite or NaN, the
// head cannot be used anymore, because the former values are gone.
absl::Status CheckFinite(HeadSession& session, const StepRequest& request,
                         const NotFinite& not_finite_before) {
  const absl::StatusOr<Measurement> measured = MeasureHead(session);
  if (!measured.ok()) return TensorsFailed(session, "reading the weights of", measured.status());
  session.magnitudes = measured->most;
  const int64_t more = measured->not_finite.MoreThan(not_finite_before);
  if (more == 0) return absl::OkStatus();
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

// A head is not reset while a client sends rows into its gradients. Called with the lock held.
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
  // A step has at most max_step_microbatches microbatches, and as many contributions.
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
  LOSSD_RETURN_IF_ERROR(CheckTrained(session));
  GradNormResult result;
  {
    absl::MutexLock lock(&session.context().mutex);
    const OpenStep& open = session.step();
    const NamedStep named{.step = step.value_or(open.number()), .run = run};
    LOSSD_RETURN_IF_ERROR(open.CheckNumber("step", named, session.context().runtime->WallNow()));
    LOSSD_RETURN_IF_ERROR(open.CheckValid());
    result.state = open.state();
  }
  const absl::StatusOr<double> norm = NormOnDevice(session);
  if (!norm.ok()) return norm.status();
  result.grad_norm = *norm;
  return result;
}

// The order: answer a repeat; check that the step is complete; check what the update may do to the weights;
// BeginClose; update on the device; check the result if its reach was unknown; open the next step. Until
// BeginClose nothing has changed, so every error leaves the step open. An error after it also leaves the step
// open, but the weights may be invalid (TensorsFailed, CheckFinite).
absl::StatusOr<StepResult> ApplyStep(HeadSession& session, const StepRequest& request) {
  absl::Mutex& mutex = session.context().mutex;
  OpenStep& step = session.step();
  int64_t update = 0;
  {
    absl::MutexLock lock(&mutex);
    if (step.last().IsRepeat(request)) {
      LOSSD_RETURN_IF_ERROR(step.last().CheckRepeat(request));
      StepResult result = step.last().Result(step.state());
      result.repeated = true;
      return result;
    }
    auto complete = step.CheckComplete(request, session.schedule().backlog().waits_for,
                                       session.context().runtime->WallNow());
    if (!complete.ok()) return complete;
    update = request.begin_optimizer ? 1 : static_cast<int64_t>(step.updates()) + 1;
  }
  auto valid = kernels::CheckTrainedBy(session.config(), request.optimizer);
  if (!valid.ok()) return valid;
  LOSSD_RETURN_IF_ERROR(CheckOptionsFit(request.optimizer, update));
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
  LOSSD_RETURN_IF_ERROR(CheckTrained(session));
  {
    absl::MutexLock lock(&session.context().mutex);
    const NamedStep named{.step = step, .run = run};
    auto open = session.step().CheckNumber("step", named, session.context().runtime->WallNow());
    if (!open.ok()) return open;
  }
  LOSSD_RETURN_IF_ERROR(ClearGradients(session));
  absl::MutexLock lock(&session.context().mutex);
  session.EnterStep([](OpenStep& open) { open.Restart(); });
  return session.step().state();
}

namespace {

// Shares change between steps, while nothing is under way on the head. Called with the lock held.
absl::Status CheckBetweenSteps(HeadSession& session) {
  OpenStep& step = session.step();
  const std::pair<int64_t, absl::string_view> all[] = {
      {session.streams().size(), "open ComputeLoss or Backward calls"},
      {session.teaching.streams(), "open ComputeLoss calls that it teaches"},
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
    LOSSD_RETURN_IF_ERROR(CheckNothingOpen(session));
    if (auto usable = session.step().CheckTensors(); !all && !usable.ok()) return usable;
  }
  if (session.config().trainable) {
    LOSSD_RETURN_IF_ERROR(ClearGradients(session));
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

// ---- Contributions ----

namespace {

absl::Status CheckSpec(const ContributionSpec& spec, const kernels::HeadConfig& config) {
  if (!kernels::HasTensor(config, {spec.param, kernels::Role::kGradient})) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "open.param",
                      "must be a trained parameter of the head", kernels::Name(spec.param));
  }
  if (!std::isfinite(spec.scale))
    return InvalidField("open.scale", "must be finite", absl::StrCat(spec.scale));
  const RowRange all{0, kernels::ShapeOf(config, spec.param).rows};
  const RowRange whole = spec.contribution_rows.value_or(all);
  if (!whole.IsWithin(all)) {
    return InvalidField("open.contribution_rows", absl::StrCat("must lie in ", Text(all)), Text(whole));
  }
  if (!spec.rows.value_or(whole).IsWithin(whole)) {
    return InvalidField("open.rows", absl::StrCat("must lie in ", Text(whole)), Text(*spec.rows));
  }
  return absl::OkStatus();
}

// Checks whether the call may still add to the head's gradients.
absl::Status CheckOpen(HeadSession& session, const Contribution& contribution) {
  const OpenStep& step = session.step();
  LOSSD_RETURN_IF_ERROR(step.CheckBound(contribution.binding));
  if (session.order() != nullptr && !session.order()->HasTurn(contribution.id)) {
    return absl::UnavailableError(
        absl::StrCat("contribution ", contribution.id,
                     " lost its turn, because an earlier microbatch failed (send it "
                     "again when that has been sent again)"));
  }
  return step.CheckValid();
}

absl::Status CheckId(OpenStep& step, uint64_t id) {
  if (!step.ledger().Contains(id)) return absl::OkStatus();
  return FieldError(absl::StatusCode::kFailedPrecondition, "open.contribution_id",
                    "names a microbatch of this step", absl::StrCat(id));
}

// Enters the contribution in the ledger if it is not there yet.
absl::Status Declare(OpenStep& step, const Contribution& contribution) {
  LOSSD_RETURN_IF_ERROR(CheckId(step, contribution.id));
  absl::Status declared = step.contributions().Declare(contribution.id, contribution.terms);
  if (declared.ok()) step.history().OnRows(contribution.run);
  return declared;
}

// The runs of rows that were not added before.
absl::StatusOr<std::vector<RowRange>> Pending(HeadSession& session, const Contribution& contribution,
                                              const ContributionRows& rows) {
  absl::MutexLock lock(&session.context().mutex);
  LOSSD_RETURN_IF_ERROR(CheckOpen(session, contribution));
  LOSSD_RETURN_IF_ERROR(Declare(session.step(), contribution));
  return session.step().contributions().Pending(contribution.id, rows.rows, rows.checksums);
}

absl::Status AddOnDevice(HeadSession& session, const Contribution& contribution, RowRange run,
                         absl::Span<const uint8_t> values) {
  const absl::Status status =
      session.head().kernels().AddGradient(contribution.terms.param, run.begin, run.size(),
                                           contribution.terms.dtype, contribution.terms.scale, values);
  if (status.ok()) return status;
  session.context().observers.Tell(&EngineObserver::OnDeviceError, status);
  absl::MutexLock lock(&session.context().mutex);
  session.OnAccumulationFailed(status);
  return session.step().gradients_status();
}

}  // namespace

absl::StatusOr<Contribution> OpenContribution(HeadSession& session, const ContributionSpec& spec) {
  OpenStep& step = session.step();
  LOSSD_RETURN_IF_ERROR(CheckSpec(spec, session.config()));
  LOSSD_RETURN_IF_ERROR(step.CheckGeneration("open.generation", spec.generation));
  const NamedStep named{.step = spec.step, .run = spec.run};
  LOSSD_RETURN_IF_ERROR(step.CheckNumber("open.step", named, session.context().runtime->WallNow()));
  LOSSD_RETURN_IF_ERROR(step.CheckValid());
  LOSSD_RETURN_IF_ERROR(CheckId(step, spec.contribution_id));
  const kernels::TensorShape shape = kernels::ShapeOf(session.config(), spec.param);
  Contribution contribution{.session = session.shared_from_this(),
                            .state = step.state(),
                            .binding = {.generation = step.versions().generation()},
                            .id = spec.contribution_id,
                            .terms = {.param = spec.param,
                                      .rows = spec.contribution_rows.value_or(RowRange{0, shape.rows}),
                                      .dtype = spec.dtype,
                                      .scale = spec.scale},
                            .cols = shape.cols,
                            .run = spec.run,
                            .counted = std::make_shared<CountedCall>(session.streams().contributions())};
  contribution.rows = spec.rows.value_or(contribution.terms.rows);
  // A contribution enters the ledger with its first rows. One without rows is complete and enters it now.
  if (contribution.terms.rows.size() > 0) {
    auto possible = step.contributions().CheckDeclare(contribution.id, contribution.terms);
    if (!possible.ok()) return possible;
    return contribution;
  }
  LOSSD_RETURN_IF_ERROR(Declare(step, contribution));
  if (session.order() != nullptr) session.order()->OnContribution();
  return contribution;
}

bool ForgetTurn(const Contribution& contribution, uint64_t ticket) {
  absl::MutexLock lock(&contribution.session->context().mutex);
  DeterministicSchedule* const order = contribution.session->order();
  return order != nullptr && order->ForgetTurn(ticket);
}

absl::Status CheckRows(const Contribution& contribution, RowRange rows, absl::Span<const uint8_t> values) {
  const int64_t row_bytes = contribution.row_bytes();
  if (!rows.IsWithin(contribution.rows)) {
    return InvalidField("payload", absl::StrCat("must have rows in ", Text(contribution.rows)), Text(rows));
  }
  if (static_cast<int64_t>(values.size()) != rows.size() * row_bytes) {
    return InvalidField("payload", absl::StrCat("must have ", errors::ExactBytes(rows.size() * row_bytes)),
                        absl::StrCat(values.size()));
  }
  return CheckFinite(contribution, rows, values);
}

absl::StatusOr<AddedRows> AddRows(HeadSession& session, const Contribution& contribution,
                                  const ContributionRows& rows) {
  const absl::StatusOr<std::vector<RowRange>> pending = Pending(session, contribution, rows);
  if (!pending.ok()) return pending.status();
  const int64_t row_bytes = contribution.row_bytes();
  AddedRows added;
  for (RowRange run : *pending) {
    const auto values = rows.values.subspan(static_cast<size_t>((run.begin - rows.rows.begin) * row_bytes),
                                            static_cast<size_t>(run.size() * row_bytes));
    LOSSD_RETURN_IF_ERROR(AddOnDevice(session, contribution, run, values));
    added.rows += run.size();
  }
  absl::MutexLock lock(&session.context().mutex);
  OpenStep& step = session.step();
  step.contributions().Commit(contribution.id, rows.rows, rows.checksums);
  if (added.rows > 0) step.versions().NewAccumulation();
  if (session.order() != nullptr) session.order()->OnContribution();
  added.state = step.state();
  return added;
}

// ---- Bounds of an update ----

namespace {

using kernels::OptimizerOptions;

// The updates, for gradients g after the multiplier:
//   AdamW: m1 = beta1 m1 + (1 - beta1) g;  m2 = beta2 m2 + (1 - beta2) g^2;
//          value = keep value - rate m1 / (sqrt(m2 / (1 - beta2^update)) + epsilon), keep and rate as below.
//   SGD:   g += decay value; buffer = momentum buffer + (1 - dampening) g (the first update: buffer = g);
//          value -= learning_rate * (buffer, or with nesterov g + momentum buffer, or without momentum g).
// The functions below put bounds of magnitudes in the place of the values.

constexpr double kMostFloat = std::numeric_limits<float>::max();
// A bound: sums and products up to it stay finite in fp32, with roundings.
constexpr double kSafe = 1e37;
constexpr double kMostGradient = 1e19;  // a bound of gradients: its square stays finite in fp32
constexpr double kGrowth = 1.0 + 4e-7;  // the factor by which rounding may enlarge a result

bool IsAdamW(const OptimizerOptions& options) { return options.kind == OptimizerOptions::Kind::kAdamW; }

absl::Status TooLarge(absl::string_view field, absl::string_view what, double value) {
  return InvalidField(field, absl::StrCat("must be a number that fp32 has", what), absl::StrCat(value));
}

// The factor by which the update multiplies the quotient of the moments (AdamW) or the gradient (SGD).
double RateOf(const OptimizerOptions& options, int64_t update) {
  if (!IsAdamW(options)) return options.learning_rate;
  return options.learning_rate / (1.0 - std::pow(options.beta1, static_cast<double>(update)));
}

bool Fits(double most) { return most <= kSafe; }  // false for NaN

double DecayOf(const OptimizerOptions& options, bool is_vector) {
  return is_vector && !options.decay_vectors ? 0.0 : options.weight_decay;
}

// AdamW: the factor of weight decay, by which a value is multiplied.
double KeepOf(const OptimizerOptions& options, bool is_vector) {
  return 1.0 - options.learning_rate * DecayOf(options, is_vector);
}

// True if the factor makes no value larger and leaves infinite values unchanged.
bool IsPlainKeep(double keep) { return static_cast<float>(keep) > 0.0f && keep <= 1.0; }

// Bounds after the update, of the matrix or of the vectors.
struct Outcome {
  bool bounded = false;
  double value = Magnitudes::kUnknown;
  double moment1 = Magnitudes::kUnknown;
};

// `fits`: everything that is computed on the way stays finite. A change of at most kMostChange is safe for
// any value.
Outcome AfterChange(double value, double change, double moment1, bool fits) {
  const double after = kGrowth * value + change;
  return {.bounded = fits && (change <= kMostChange || Fits(after)), .value = after, .moment1 = moment1};
}

// `gradient`, here and below: a bound of |gradient|, after the multiplier.
double AdamMoment1(const OptimizerOptions& options, double gradient, double before) {
  return kGrowth * (static_cast<float>(options.beta1) * before + (1.0 - options.beta1) * gradient);
}

double AdamMoment2(const OptimizerOptions& options, double gradient, double before) {
  return kGrowth * (static_cast<float>(options.beta2) * before + (1.0 - options.beta2) * gradient * gradient);
}

// The largest change of a value. The second moment may be 0 although the first is not, because the square of
// a small gradient is 0 in fp32 and the decay rates may have been different before. So epsilon alone bounds
// the quotient.
double AdamChange(const OptimizerOptions& options, double rate, double moment1) {
  if (moment1 == 0.0) return 0.0;
  const float epsilon = static_cast<float>(options.epsilon);
  // A device may treat a subnormal epsilon as 0.
  if (epsilon < std::numeric_limits<float>::min()) return Magnitudes::kUnknown;
  return Fits(rate * moment1) ? rate * moment1 / epsilon : Magnitudes::kUnknown;
}

Outcome AfterAdamW(const OptimizerOptions& options, double change, bool is_vector, double value) {
  const double keep = KeepOf(options, is_vector);
  if (IsPlainKeep(keep)) return AfterChange(value, change, 0.0, true);
  const double kept = std::abs(keep) * value;
  return AfterChange(kept, change, 0.0, Fits(kept + change));
}

Outcome AfterSgd(const OptimizerOptions& options, int64_t update, double gradient, bool is_vector,
                 double value, double moment1) {
  const double decay = DecayOf(options, is_vector);
  const double g = decay > 0.0 ? gradient + decay * value : gradient;
  if (options.momentum == 0.0) {
    return AfterChange(value, options.learning_rate * g, moment1, Fits(g));
  }
  const double kept = update == 1 ? 0.0 : options.momentum;
  const double taken = update == 1 ? 1.0 : std::abs(1.0 - options.dampening);
  const double buffer = kGrowth * (kept * moment1 + taken * g);
  const double step = options.nesterov ? g + options.momentum * buffer : buffer;
  return AfterChange(value, options.learning_rate * step, buffer, Fits(g) && Fits(buffer) && Fits(step));
}

Reach AdamReach(const OptimizerOptions& options, double rate, double gradient, const Magnitudes& before) {
  const double moment1 = AdamMoment1(options, gradient, before.moment1);
  const double moment2 = AdamMoment2(options, gradient, before.moment2);
  const double change = AdamChange(options, rate, moment1);
  const Outcome matrix = AfterAdamW(options, change, false, before.matrix);
  const Outcome vectors = AfterAdamW(options, change, true, before.vectors);
  const bool moments_fit = Fits(moment1) && moment2 <= 2.0 * kMostGradient * kMostGradient;
  return {
      .reach =
          moments_fit && matrix.bounded && vectors.bounded ? UpdateReach::kBounded : UpdateReach::kUnknown,
      .after = {.matrix = matrix.value, .vectors = vectors.value, .moment1 = moment1, .moment2 = moment2}};
}

Reach SgdReach(const OptimizerOptions& options, int64_t update, double gradient, const Magnitudes& before) {
  const Outcome matrix = AfterSgd(options, update, gradient, false, before.matrix, before.moment1);
  const Outcome vectors = AfterSgd(options, update, gradient, true, before.vectors, before.moment1);
  return {.reach = matrix.bounded && vectors.bounded ? UpdateReach::kBounded : UpdateReach::kUnknown,
          .after = {.matrix = matrix.value,
                    .vectors = vectors.value,
                    .moment1 = std::max(matrix.moment1, vectors.moment1),
                    .moment2 = before.moment2}};
}

}  // namespace

absl::Status CheckOptionsFit(const OptimizerOptions& options, int64_t update) {
  const bool adamw = IsAdamW(options);
  const absl::string_view kind = adamw ? "optimizer.adamw." : "optimizer.sgd.";
  const auto check = [&](absl::string_view name, double value) {
    if (std::abs(value) <= kMostFloat) return absl::OkStatus();
    return TooLarge(absl::StrCat(kind, name), "", value);
  };
  if (std::abs(options.grad_multiplier) > kMostFloat) {
    return TooLarge("optimizer.grad_multiplier", "", options.grad_multiplier);
  }
  absl::Status status = check("learning_rate", options.learning_rate);
  status.Update(check("weight_decay", options.weight_decay));
  if (adamw) {
    status.Update(check("epsilon", options.epsilon));
  } else {
    status.Update(check("momentum", options.momentum));
    status.Update(check("dampening", options.dampening));
  }
  if (!status.ok()) return status;
  if (options.learning_rate * options.weight_decay > kMostFloat) {
    return TooLarge(absl::StrCat(kind, "weight_decay"), ", also times the learning rate",
                    options.weight_decay);
  }
  if (RateOf(options, update) > kMostFloat) {
    return TooLarge(absl::StrCat(kind, "learning_rate"), ", also divided by 1 - beta1^updates",
                    options.learning_rate);
  }
  return absl::OkStatus();
}

absl::StatusOr<Reach> CheckReach(const OptimizerOptions& options, int64_t update, double norm,
                                 const Magnitudes& before) {
  const bool adamw = IsAdamW(options);
  const double gradient = std::abs(options.grad_multiplier) * norm;
  const double rate = RateOf(options, update);
  const double most_gradient = adamw ? kMostGradient : kMostFloat;
  if (gradient > most_gradient) {
    return InvalidField("optimizer.grad_multiplier",
                        absl::StrCat("times the norm of the gradients, ", norm, ", is more than ",
                                     most_gradient, ", the most that fp32 ", adamw ? "moments take" : "has"),
                        absl::StrCat(options.grad_multiplier));
  }
  const double change = adamw ? rate : rate * gradient;
  if (change > kMostChange) {
    return InvalidField(adamw ? "optimizer.adamw.learning_rate" : "optimizer.sgd.learning_rate",
                        absl::StrCat("would change weights by up to ", change, ", more than ", kMostChange),
                        absl::StrCat(options.learning_rate));
  }
  Reach reach =
      adamw ? AdamReach(options, rate, gradient, before) : SgdReach(options, update, gradient, before);
  if (options.lazy_rows) {
    // Rows that the step skips keep their magnitude.
    reach.after.matrix = std::max(reach.after.matrix, before.matrix);
    reach.after.moment1 = std::max(reach.after.moment1, before.moment1);
    reach.after.moment2 = std::max(reach.after.moment2, before.moment2);
  }
  return reach;
}

absl::Status CheckDecay(const OptimizerOptions& options, const Magnitudes& measured) {
  const auto spoils = [&](bool is_vector) {
    const double most = is_vector ? measured.vectors : measured.matrix;
    if (std::isfinite(most)) return false;
    return IsAdamW(options) ? !IsPlainKeep(KeepOf(options, is_vector)) : DecayOf(options, is_vector) > 0.0;
  };
  if (spoils(/*is_vector=*/true)) {
    return InvalidField("optimizer.decay_vectors",
                        "must be false while a bias, norm gain or norm shift of the head is infinite or NaN, "
                        "which such a decay would spoil",
                        "true");
  }
  if (!spoils(/*is_vector=*/false)) return absl::OkStatus();
  return InvalidField(
      IsAdamW(options) ? "optimizer.adamw.weight_decay" : "optimizer.sgd.weight_decay",
      "must be 0 while a weight of the head is infinite or NaN, which such a decay would spoil",
      absl::StrCat(options.weight_decay));
}

namespace {

Binding BindingOf(kernels::Role role, const HeadVersions& versions) {
  if (role == kernels::Role::kGradient) return {.accumulation = versions.accumulation()};
  Binding binding{.weights = versions.weights()};
  if (role != kernels::Role::kValue) binding.moments = versions.moments();
  return binding;
}

}  // namespace

// ---- TensorReader ----

const kernels::HeadConfig& TensorReader::config() const { return session_->config(); }

absl::StatusOr<HeadState> TensorReader::Read(kernels::TensorId id, RowRange rows, kernels::DType dtype,
                                             absl::Span<uint8_t> out) {
  HeadState state;
  const absl::Status status = session_->Run([&]() -> absl::Status {
    {
      absl::MutexLock lock(&session_->context().mutex);
      OpenStep& step = session_->step();
      if (!binding_.has_value()) {
        const bool gradient = id.role == kernels::Role::kGradient;
        LOSSD_RETURN_IF_ERROR(gradient ? step.CheckGradients() : step.CheckTensors());
        binding_ = BindingOf(id.role, step.versions());
      }
      LOSSD_RETURN_IF_ERROR(step.CheckBound(*binding_));
      state = step.state();
    }
    return session_->context().NoteIfLost(session_->head().ReadRows(id, rows.begin, rows.size(), dtype, out));
  });
  if (!status.ok()) return status;
  return state;
}

void TensorReader::NoteSaved(const HeadSnapshot& saved, absl::string_view checkpoint, absl::Time saved_at) {
  absl::MutexLock lock(&session_->context().mutex);
  session_->step().history().OnSaved(saved.origin, checkpoint, saved.state.step, saved_at);
}

// ---- TensorWriter ----

TensorWriter::~TensorWriter() {
  if (!token_.has_value()) return;
  absl::MutexLock lock(&session_->context().mutex);
  session_->step().versions().EndWrite(*token_, /*several=*/true);
}

const kernels::HeadConfig& TensorWriter::config() const { return session_->config(); }

void TensorWriter::SetRows(kernels::TensorId id, RowRange rows) {
  id_ = id;
  rows_ = rows;
}

absl::StatusOr<HeadState> TensorWriter::Write(RowRange rows, kernels::DType dtype,
                                              absl::Span<const uint8_t> in) {
  absl::StatusOr<HeadState> state;
  const absl::Status status = session_->Run([&] {
    state = WriteOnDevice(rows, dtype, in);
    return state.status();
  });
  if (!status.ok()) return status;
  return state;
}

absl::StatusOr<HeadState> TensorWriter::WriteOnDevice(RowRange rows, kernels::DType dtype,
                                                      absl::Span<const uint8_t> in) {
  absl::Mutex& mutex = session_->context().mutex;
  HeadVersions& versions = session_->step().versions();
  const bool is_first = !token_.has_value();
  {
    absl::MutexLock lock(&mutex);
    if (is_first) {
      token_ = versions.BeginWrite(id_.role == kernels::Role::kValue ? Written::kValue : Written::kMoment);
      session_->EndStale();
    } else if (!versions.IsWriting(*token_)) {
      return absl::AbortedError("a checkpoint was loaded, or the head was reset, during the call");
    }
  }
  const absl::Status written =
      session_->context().NoteIfLost(session_->head().WriteRows(id_, rows.begin, rows.size(), dtype, in));
  absl::MutexLock lock(&mutex);
  if (!written.ok() || rows.end == rows_.end) versions.EndWrite(*token_, /*several=*/!is_first);
  if (!written.ok()) return written;
  return session_->step().state();
}

}  // namespace lossd::engine
