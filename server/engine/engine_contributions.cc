// EngineImpl: gradients from outside.
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/engine_impl.h"
#include "server/engine/errors.h"

namespace lossd::engine {
namespace {

bool Inside(RowRange inner, RowRange outer) {
  return inner.begin >= outer.begin && inner.begin <= inner.end && inner.end <= outer.end;
}

absl::Status CheckSpec(const ContributionSpec& spec, const kernels::HeadConfig& config) {
  if (!kernels::HasTensor(config, {spec.param, kernels::Role::kGradient})) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "open.param",
                      "must be a trained parameter of the head", kernels::Name(spec.param));
  }
  if (!std::isfinite(spec.scale))
    return InvalidField("open.scale", "must be finite", absl::StrCat(spec.scale));
  const RowRange all{0, kernels::ShapeOf(config, spec.param).rows};
  const RowRange whole = spec.contribution_rows.value_or(all);
  if (!Inside(whole, all)) {
    return InvalidField("open.contribution_rows", absl::StrCat("must lie in ", Text(all)), Text(whole));
  }
  if (!Inside(spec.rows.value_or(whole), whole)) {
    return InvalidField("open.rows", absl::StrCat("must lie in ", Text(whole)), Text(*spec.rows));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Contribution> EngineImpl::OpenContribution(const ContributionSpec& spec) {
  absl::MutexLock lock(&mutex_);
  if (stopping_) return absl::UnavailableError("the server is shutting down");
  auto found = Find(spec.head);
  if (!found.ok()) return found.status();
  Entry& entry = **found;
  if (!entry.published) return absl::UnavailableError(absl::StrCat("head ", spec.head, " is being created"));
  if (auto status = CheckSpec(spec, entry.config); !status.ok()) return status;
  if (spec.step != entry.step) return StepNotOpen("open.step", spec.step, entry.step);
  if (auto trusted = CheckTrusted(entry); !trusted.ok()) return trusted;
  if (entry.ledger.Contains(spec.contribution_id)) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "open.contribution_id",
                      "names a microbatch of this step", absl::StrCat(spec.contribution_id));
  }
  const kernels::TensorShape shape = kernels::ShapeOf(entry.config, spec.param);
  Contribution contribution{.head = entry.name,
                            .state = {.incarnation = incarnation_, .step = entry.step},
                            .id = spec.contribution_id,
                            .terms = {.param = spec.param,
                                      .rows = spec.contribution_rows.value_or(RowRange{0, shape.rows}),
                                      .dtype = spec.dtype,
                                      .scale = spec.scale},
                            .cols = shape.cols,
                            .generation = entry.generation};
  contribution.rows = spec.rows.value_or(contribution.terms.rows);
  if (auto status = entry.contributions.Declare(contribution.id, contribution.terms); !status.ok())
    return status;
  if (entry.sequencer != nullptr) {
    entry.sequencer->OnContribution();  // it may have nothing to add
    GrantRooms(entry);
  }
  return contribution;
}

// ---- Turns (deterministic mode) ----

// Also of contributions that are behind it: all their rows were added.
bool EngineImpl::HasTurn(const Entry& entry, uint64_t contribution_id) {
  return entry.sequencer == nullptr || contribution_id <= entry.sequencer->turn().microbatch_id;
}

uint64_t EngineImpl::AwaitTurn(const Contribution& contribution, absl::AnyInvocable<void()> ready) {
  absl::MutexLock lock(&mutex_);
  auto entry = Find(contribution.head);
  if (stopping_ || !entry.ok() || contribution.generation != (*entry)->generation) return 0;
  if (HasTurn(**entry, contribution.id)) return 0;
  (*entry)->turn_waiters.push_back(
      {++last_turn_ticket_, contribution.id, contribution.generation, std::move(ready)});
  return last_turn_ticket_;
}

bool EngineImpl::ForgetTurn(const Contribution& contribution, uint64_t ticket) {
  absl::MutexLock lock(&mutex_);
  const auto it = entries_.find(contribution.head);
  if (it == entries_.end()) return false;
  return std::erase_if(it->second->turn_waiters,
                       [&](const TurnWaiter& waiter) { return waiter.ticket == ticket; }) > 0;
}

void EngineImpl::CallTurns(Entry& entry) {
  const bool all = stopping_ || entry.deleting;
  std::erase_if(entry.turn_waiters, [&](TurnWaiter& waiter) {
    const bool call = all || waiter.generation != entry.generation || HasTurn(entry, waiter.contribution_id);
    if (call) notifier_.Post(std::move(waiter.ready));
    return call;
  });
}

// ---- Rows ----

// Whether the call may still add to the head's gradients.
absl::Status EngineImpl::CheckContribution(const Entry& entry, const Contribution& contribution) const {
  if (contribution.state.step != entry.step) {
    return StepNotOpen("open.step", contribution.state.step, entry.step);
  }
  if (contribution.generation != entry.generation) {
    return absl::AbortedError(
        "the step's gradients were zeroed, or a checkpoint was loaded, during the call");
  }
  if (!HasTurn(entry, contribution.id)) {
    return absl::UnavailableError(
        absl::StrCat("contribution ", contribution.id,
                     " lost its turn, because an earlier microbatch failed (send it "
                     "again when that has been sent again)"));
  }
  return CheckTrusted(entry);
}

absl::StatusOr<int64_t> EngineImpl::AddRows(const Contribution& contribution, RowRange rows,
                                            absl::Span<const uint8_t> values) {
  const int64_t row_bytes = contribution.row_bytes();
  if (!Inside(rows, contribution.rows)) {
    return InvalidField("payload", absl::StrCat("must have rows in ", Text(contribution.rows)), Text(rows));
  }
  if (static_cast<int64_t>(values.size()) != rows.size() * row_bytes) {
    return InvalidField("payload", absl::StrCat("must have ", rows.size() * row_bytes, " bytes"),
                        absl::StrCat(values.size()));
  }
  if (auto status = CheckFinite(contribution, rows, values); !status.ok()) return status;
  const std::vector<uint64_t> checksums = RowChecksums(values, row_bytes);
  int64_t added = 0;
  absl::Status status = RunOnHead(contribution.head, [&](Entry& entry, head::Head& head) -> absl::Status {
    std::vector<RowRange> pending;
    {
      absl::MutexLock lock(&mutex_);
      if (auto open = CheckContribution(entry, contribution); !open.ok()) return open;
      auto found = entry.contributions.Pending(contribution.id, rows, checksums);
      if (!found.ok()) return found.status();
      pending = *std::move(found);
    }
    // Only this thread changes a step or its contributions, so what was checked still holds.
    for (RowRange run : pending) {
      const auto bytes = values.subspan(static_cast<size_t>((run.begin - rows.begin) * row_bytes),
                                        static_cast<size_t>(run.size() * row_bytes));
      absl::Status done =
          head.kernels().AddGradient(contribution.terms.param, run.begin, run.size(),
                                     contribution.terms.dtype, contribution.terms.scale, bytes);
      if (!done.ok()) {
        observer_->OnDeviceError(done);
        absl::MutexLock lock(&mutex_);
        Distrust(entry, done);
        return entry.distrust;
      }
      added += run.size();
    }
    absl::MutexLock lock(&mutex_);
    entry.contributions.Commit(contribution.id, rows, checksums);
    if (entry.sequencer != nullptr) {
      entry.sequencer->OnContribution();
      GrantRooms(entry);
    }
    return absl::OkStatus();
  });
  if (!status.ok()) return status;
  observer_->OnContribution(contribution.head, added);
  return added;
}

}  // namespace lossd::engine
