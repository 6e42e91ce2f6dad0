// SPDX-License-Identifier: Apache-2.0
// Hidden states and a weight like a real model's, for benchmarks: how peaked the rows are decides what
// computing their gradients costs (kernels/data).
#ifndef LOSSD_CLIENT_CLI_REAL_ROWS_H_
#define LOSSD_CLIENT_CLI_REAL_ROWS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/random_rows.h"
#include "client/cpp/client.h"
#include "kernels/data/real_rows.h"

namespace lossd::cli {

// OK if rows of real data mean something to such a head: FAILED_PRECONDITION if it has a norm or a bias.
absl::Status CheckTakesRealRows(const v1::HeadSpec& spec);

// All rows of `rows`, as `dtype`. Thread-safe.
absl::StatusOr<HiddenRows> MakeRealRows(const data::RealRows& rows, v1::DType dtype);

// Replaces the weight of `head` [V, D] by the one that belongs to the rows, some thousand classes at a time.
absl::Status WriteRealWeight(const data::RealRows& rows, const std::string& head, client::Client& client);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_REAL_ROWS_H_
