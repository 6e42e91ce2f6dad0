// SPDX-License-Identifier: Apache-2.0
#include "server/engine/contribution_operations.h"

#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "kernels/errors/bytes.h"
#include "server/engine/errors.h"

namespace lossd::engine {
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

// Whether the call may still add to the head's gradients.
absl::Status CheckOpen(HeadSession& session, const Contribution& contribution) {
  const OpenStep& step = session.step();
  if (auto bound = step.CheckBound(contribution.binding); !bound.ok()) return bound;
  if (!session.schedule().HasTurn(contribution.id)) {
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

// Enters the contribution in the ledger, if it is not there.
absl::Status Declare(OpenStep& step, const Contribution& contribution) {
  if (auto status = CheckId(step, contribution.id); !status.ok()) return status;
  absl::Status declared = step.contributions().Declare(contribution.id, contribution.terms);
  if (declared.ok()) step.history().OnRows(contribution.run);
  return declared;
}

// The runs of rows that have not been added.
absl::StatusOr<std::vector<RowRange>> Pending(HeadSession& session, const Contribution& contribution,
                                              const ContributionRows& rows) {
  absl::MutexLock lock(&session.context().mutex);
  if (auto open = CheckOpen(session, contribution); !open.ok()) return open;
  if (auto declared = Declare(session.step(), contribution); !declared.ok()) return declared;
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
  if (auto status = CheckSpec(spec, session.config()); !status.ok()) return status;
  if (auto meant = step.CheckGeneration("open.generation", spec.generation); !meant.ok()) return meant;
  const NamedStep named{.step = spec.step, .run = spec.run};
  if (auto open = step.CheckNumber("open.step", named, session.context().runtime->WallNow()); !open.ok())
    return open;
  if (auto valid = step.CheckValid(); !valid.ok()) return valid;
  if (auto status = CheckId(step, spec.contribution_id); !status.ok()) return status;
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
  // Booked with its first rows, unless it is complete without any.
  if (contribution.terms.rows.size() > 0) {
    auto possible = step.contributions().CheckDeclare(contribution.id, contribution.terms);
    if (!possible.ok()) return possible;
    return contribution;
  }
  if (auto status = Declare(step, contribution); !status.ok()) return status;
  session.schedule().OnContribution();
  return contribution;
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
    if (auto status = AddOnDevice(session, contribution, run, values); !status.ok()) return status;
    added.rows += run.size();
  }
  absl::MutexLock lock(&session.context().mutex);
  OpenStep& step = session.step();
  step.contributions().Commit(contribution.id, rows.rows, rows.checksums);
  if (added.rows > 0) step.versions().NewAccumulation();
  session.schedule().OnContribution();
  added.state = step.state();
  return added;
}

}  // namespace lossd::engine
