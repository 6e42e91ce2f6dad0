// SPDX-License-Identifier: Apache-2.0
// Contributions to the gradients of a head: opening them, and adding their rows.
#ifndef LOSSD_SERVER_ENGINE_CONTRIBUTION_OPERATIONS_H_
#define LOSSD_SERVER_ENGINE_CONTRIBUTION_OPERATIONS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/engine/contribution.h"
#include "server/engine/head_session.h"

namespace lossd::engine {

// As Engine::OpenContribution, with the lock held.
absl::StatusOr<Contribution> OpenContribution(HeadSession& session, const ContributionSpec& spec);

// Rows of a contribution that have been checked as far as that needs no head. Views live as long as the
// arguments.
struct ContributionRows {
  RowRange rows;
  absl::Span<const uint8_t> values;      // [rows.size(), cols]
  absl::Span<const uint64_t> checksums;  // [rows.size()]
};
// INVALID_ARGUMENT or OUT_OF_RANGE naming what is wrong. Without the lock, on any thread.
absl::Status CheckRows(const Contribution& contribution, RowRange rows, absl::Span<const uint8_t> values);
// The body of an operation (step_operations.h): adds those of the rows that had not been added before,
// together with their entries in the ledger. The rest as Engine::AddRows.
absl::StatusOr<AddedRows> AddRows(HeadSession& session, const Contribution& contribution,
                                  const ContributionRows& rows);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_CONTRIBUTION_OPERATIONS_H_
