// SPDX-License-Identifier: Apache-2.0
// The checks and transitions of a head's steps, and the explanations for callers that name another step
// (open_step.h).
//
// A step is closed in three parts: CheckComplete; BeginClose, from which on no rows may join (closing_ is
// set) while the device updates the weights; and Close or CancelClose. Every change to a new step or to new
// gradients ends in Enter.
#include "server/engine/open_step.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/errors/status_macros.h"
#include "server/engine/errors.h"

namespace lossd::engine {

// ---- LastStep ----

void LastStep::Set(uint64_t number, const head::AppliedStep& applied, std::vector<uint64_t> complete_ids) {
  number_ = number;
  applied_ = applied;
  complete_ids_ = std::move(complete_ids);
}

void LastStep::SetLoaded(uint64_t number, const std::optional<head::AppliedStep>& applied) {
  number_ = number;
  applied_ = applied;
  complete_ids_.reset();
}

absl::Status LastStep::CheckRepeat(const StepRequest& request) const {
  const head::AppliedStep& last = *applied_;
  LOSSD_RETURN_IF_ERROR(CheckIncarnation(request.incarnation, last.incarnation));
  // Generation 0: not known.
  if (last.generation != 0 && request.generation.value_or(last.generation) != last.generation)
    return WithCurrentStep(OtherGeneration("generation", *request.generation, last.generation), number_ + 1);
  if (!(last.optimizer == request.optimizer)) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "optimizer",
                      "differs from what this step was applied with", "other settings");
  }
  if (last.begin_optimizer != request.begin_optimizer) {
    return FieldError(
        absl::StatusCode::kFailedPrecondition, "begin_optimizer",
        absl::StrCat("must be ", last.begin_optimizer ? "true" : "false", ", as this step was applied with"),
        request.begin_optimizer ? "true" : "false");
  }
  std::vector<std::string> lines;
  if (complete_ids_.has_value()) {
    for (const uint64_t id : request.expected_microbatches) {
      if (!std::binary_search(complete_ids_->begin(), complete_ids_->end(), id))
        lines.push_back(absl::StrCat("microbatch ", id, ": was not whole in it"));
    }
  }
  if (request.expected_rows.has_value() && *request.expected_rows != last.rows) {
    lines.push_back(absl::StrCat("rows: ", last.rows, " were in it, ", *request.expected_rows, " expected"));
  }
  if (lines.empty()) return absl::OkStatus();
  absl::Status status = absl::FailedPreconditionError(
      absl::StrCat("step ", request.step, " has been applied as another one: ", lines.front()));
  return WithMissing(WithCurrentStep(std::move(status), number_ + 1), lines);
}

StepResult LastStep::Result(const HeadState& now) const {
  return {.state = now,
          .grad_norm = applied_->grad_norm,
          .microbatches = applied_->microbatches,
          .rows = applied_->rows,
          .contributions = applied_->contributions,
          .skipped = applied_->skipped,
          .applied_incarnation = applied_->incarnation};
}

// ---- StepHistory ----

namespace {

// E.g. "3 seconds ago".
std::string Ago(absl::Time then, absl::Time now) {
  const int64_t seconds = std::max<int64_t>(0, absl::ToInt64Seconds(now - then));
  const auto text = [](int64_t count, absl::string_view unit) {
    return absl::StrCat(count, " ", unit, count == 1 ? "" : "s", " ago");
  };
  if (seconds < 120) return text(seconds, "second");
  if (seconds < 120 * 60) return text(seconds / 60, "minute");
  if (seconds < 48 * 3600) return text(seconds / 3600, "hour");
  return text(seconds / (24 * 3600), "day");
}

// As Ago, with a space before it; "" if the time is not known (0).
std::string AgoIfKnown(int64_t unix_seconds, absl::Time now) {
  return unix_seconds == 0 ? "" : absl::StrCat(" ", Ago(absl::FromUnixSeconds(unix_seconds), now));
}

}  // namespace

void StepHistory::OnApplied(absl::string_view run, absl::Time now) {
  history_.run = std::string(run);
  history_.applied_unix_seconds = absl::ToUnixSeconds(now);
  applied_here_ = true;
  open_run_.reset();
}

void StepHistory::OnLoaded(uint64_t origin, const head::History& loaded) { Replace(origin, loaded); }

void StepHistory::OnReset(uint64_t origin, absl::Time now) {
  Replace(origin, {});
  reset_at_ = now;
}

void StepHistory::Replace(uint64_t origin, head::History history) {
  origin_ = origin;
  history_ = std::move(history);
  applied_here_ = false;
  reset_at_.reset();
  open_run_.reset();
}

void StepHistory::OnSaved(uint64_t origin, absl::string_view checkpoint, uint64_t step, absl::Time saved_at) {
  if (origin != origin_) return;
  history_.checkpoint = std::string(checkpoint);
  history_.checkpoint_step = step;
  history_.checkpoint_unix_seconds = absl::ToUnixSeconds(saved_at);
  history_.loaded = false;
}

std::string StepHistory::WhyNotOpen(const NamedStep& named, uint64_t open, absl::Time now) const {
  std::vector<std::string> parts;
  const std::string& run = history_.run;
  if (applied_here_) {
    const std::string when =
        absl::StrCat("applied step ", open - 1, AgoIfKnown(history_.applied_unix_seconds, now));
    if (run.empty()) {
      parts.push_back(absl::StrCat("a program that names no run ", when));
    } else if (run == named.run) {
      parts.push_back(absl::StrCat("this run, ", run, ", ", when));
    } else {
      parts.push_back(absl::StrCat("another program trains this head: run ", run, " ", when));
    }
  }
  if (!open_run().empty() && open_run() != named.run) {
    parts.push_back(absl::StrCat(parts.empty() ? "another program trains this head: " : "", "run ",
                                 open_run(), " has rows in the open step"));
  }
  const bool behind = named.step > open || !applied_here_;
  if (behind && history_.loaded) {
    const std::string saved = AgoIfKnown(history_.checkpoint_unix_seconds, now);
    parts.push_back(absl::StrCat("this head came back from a checkpoint: the server loaded ",
                                 history_.checkpoint, " of step ", history_.checkpoint_step,
                                 saved.empty() ? "" : ", saved", saved,
                                 run.empty() || applied_here_ ? "" : absl::StrCat(", trained by run ", run)));
  }
  if (behind && reset_at_.has_value()) {
    parts.push_back(absl::StrCat("the head was reset ", Ago(*reset_at_, now)));
  }
  if (parts.empty()) parts.emplace_back("no step was applied to this head since it was created");
  return absl::StrJoin(parts, "; ");
}

// ---- OpenStep ----

OpenStep::OpenStep(uint64_t incarnation, VersionCounter* counter, int64_t max_rows, int64_t max_microbatches,
                   const RowMemory::Account& memory)
    : incarnation_(incarnation),
      counter_(counter),
      versions_(counter),
      ledgers_(max_rows, max_microbatches, memory),
      history_(counter->Next()) {}

// ---- OpenStep: validity ----

void OpenStep::MarkGradientsInvalid(absl::Status why) {
  gradients_status_ = std::move(why);
  versions_.NewAccumulation();
}

absl::Status OpenStep::CheckValid() const {
  if (!weights_status_.ok()) return weights_status_;
  if (!gradients_status_.ok()) return gradients_status_;
  if (!closing_.has_value()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("step ", number(), " is being applied"));
}

absl::Status OpenStep::CheckWeights() const {
  if (!weights_status_.ok()) return weights_status_;
  if (!versions_.values_being_written()) return absl::OkStatus();
  return absl::UnavailableError("the weights are being written (WriteTensor)");
}

absl::Status OpenStep::CheckTensors() const {
  LOSSD_RETURN_IF_ERROR(CheckWeights());
  if (!versions_.being_written()) return absl::OkStatus();
  return absl::UnavailableError("the optimizer's state is being written (WriteTensor)");
}

absl::Status OpenStep::CheckNumber(absl::string_view field, const NamedStep& named, absl::Time now) const {
  if (named.step == number()) return absl::OkStatus();
  return StepNotOpen(field, named.step, number(), history_.WhyNotOpen(named, number(), now));
}

absl::Status OpenStep::CheckGeneration(absl::string_view field, std::optional<uint64_t> named) const {
  if (named.value_or(versions_.generation()) == versions_.generation()) return absl::OkStatus();
  return WithCurrentStep(OtherGeneration(field, *named, versions_.generation()), number());
}

absl::Status OpenStep::CheckBound(const Binding& binding) const {
  absl::Status changed = versions_.Check(binding);
  return changed.ok() ? weights_status_ : WithCurrentStep(std::move(changed), number());
}

// ---- OpenStep: closing ----

absl::Status OpenStep::CheckComplete(const StepRequest& request, absl::string_view waits_for,
                                     absl::Time now) const {
  LOSSD_RETURN_IF_ERROR(CheckIncarnation(request.incarnation, incarnation_));
  LOSSD_RETURN_IF_ERROR(CheckGeneration("generation", request.generation));
  if (auto open = CheckNumber("step", {.step = request.step, .run = request.run}, now); !open.ok())
    return open;
  LOSSD_RETURN_IF_ERROR(CheckValid());
  LOSSD_RETURN_IF_ERROR(CheckTensors());
  std::vector<std::string> lines = ledgers_.Missing(request.expected_microbatches);
  if (!request.expected_microbatches.empty()) {
    for (std::string& line : ledgers_.Incomplete(request.expected_microbatches))
      lines.push_back(std::move(line));
  }
  const int64_t rows = ledgers_.microbatches.accumulated_rows();
  if (request.expected_rows.has_value() && *request.expected_rows != rows) {
    lines.push_back(absl::StrCat("rows: ", rows, " accumulated, ", *request.expected_rows, " expected"));
  }
  if (lines.empty()) return absl::OkStatus();
  if (!waits_for.empty()) lines.push_back(absl::StrCat("in order: slices wait for ", waits_for));
  absl::Status status = absl::FailedPreconditionError(
      absl::StrCat("step ", number(), " is not complete: ", lines.front(),
                   lines.size() > 1 ? absl::StrCat(" (and ", lines.size() - 1, " more)") : ""));
  return WithMissing(WithCurrentStep(std::move(status), number()), lines);
}

// ---- OpenStep: transitions ----

void OpenStep::BeginClose() {
  closing_ = Contents{.microbatches = ledgers_.microbatches.begun_microbatches(),
                      .rows = ledgers_.microbatches.accumulated_rows(),
                      .contributions = ledgers_.contributions.begun_contributions(),
                      .complete_ids = ledgers_.CompleteIds()};
}

void OpenStep::Close(const StepRequest& request, double grad_norm, bool skipped, absl::Time now) {
  Contents contents = *std::move(closing_);
  last_.Set(number(),
            {.incarnation = incarnation_,
             .generation = versions_.generation(),
             .optimizer = request.optimizer,
             .grad_norm = grad_norm,
             .microbatches = contents.microbatches,
             .rows = contents.rows,
             .contributions = contents.contributions,
             .skipped = skipped,
             .begin_optimizer = request.begin_optimizer},
            std::move(contents.complete_ids));
  history_.OnApplied(request.run, now);
  const std::string why = absl::StrCat("step ", number(), " was ", skipped ? "skipped" : "applied");
  if (request.begin_optimizer) {
    updates_ = 0;
    versions_.NewMoments(why);
  }
  if (!skipped) {
    ++updates_;
    versions_.NewWeights(why);
  }
  versions_.SetStep(number() + 1, why);
  Enter(why);
}

void OpenStep::Restart(bool new_optimizer) {
  if (!new_optimizer) return Enter("the step's gradients were zeroed");
  constexpr absl::string_view kReset = "the head's optimizer was reset";
  updates_ = 0;
  versions_.NewMoments(kReset);
  Enter(kReset);
}

void OpenStep::BeginLoad(const head::Progress& progress, const std::optional<head::AppliedStep>& last_step,
                         const std::optional<head::History>& history, absl::Status why, absl::Time now) {
  const absl::string_view change = history.has_value() ? "a checkpoint was loaded" : "the head was reset";
  versions_.EndWrites();
  versions_.NewWeights(change);
  versions_.SetStep(progress.step, change);
  Enter(change);
  updates_ = progress.updates;
  weights_status_ = std::move(why);
  last_.SetLoaded(number() - 1, last_step);
  history.has_value() ? history_.OnLoaded(counter_->Next(), *history)
                      : history_.OnReset(counter_->Next(), now);
}

void OpenStep::Enter(absl::string_view why) {
  versions_.NewGeneration(why);
  gradients_status_ = absl::OkStatus();
  closing_.reset();
  history_.OnDiscarded();
}

}  // namespace lossd::engine
