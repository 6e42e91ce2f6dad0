// SPDX-License-Identifier: Apache-2.0
#include "server/engine/open_step.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/engine/errors.h"

namespace lossd::engine {

OpenStep::OpenStep(uint64_t incarnation, VersionCounter* counter, int64_t max_rows, int64_t max_microbatches,
                   const RowMemory::Account& memory)
    : incarnation_(incarnation),
      counter_(counter),
      versions_(counter),
      ledgers_(max_rows, max_microbatches, memory),
      history_(counter->Next()) {}

// ---- Validity ----

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
  if (absl::Status weights = CheckWeights(); !weights.ok()) return weights;
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

// ---- Closing ----

absl::Status OpenStep::CheckComplete(const StepRequest& request, absl::string_view waits_for,
                                     absl::Time now) const {
  if (auto meant = CheckIncarnation(request.incarnation, incarnation_); !meant.ok()) return meant;
  if (auto meant = CheckGeneration("generation", request.generation); !meant.ok()) return meant;
  if (auto open = CheckNumber("step", {.step = request.step, .run = request.run}, now); !open.ok())
    return open;
  if (absl::Status valid = CheckValid(); !valid.ok()) return valid;
  if (absl::Status valid = CheckTensors(); !valid.ok()) return valid;
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

// ---- Transitions ----

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
