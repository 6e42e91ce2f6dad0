// SPDX-License-Identifier: Apache-2.0
// What computes: the backend of this process, alone or with those of the other ranks.
//
// Stateless; thread-safe.
#ifndef LOSSD_SERVER_APP_COMPUTE_H_
#define LOSSD_SERVER_APP_COMPUTE_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/create_backend.h"
#include "server/app/local_ranks.h"
#include "server/app/server.h"
#include "server/ranks/leader.h"

namespace lossd::app {

using Backends = std::vector<kernels::CreatedBackend>;

// The backends of this process: one, or with several processes one for each of its devices, which are ranks
// in this order.
absl::StatusOr<Backends> CreateOwnBackends(const ServerOptions& options);

// In order of dependence: each uses those above it.
struct Compute {
  std::unique_ptr<LocalRanks> other_devices;  // the ranks of this process but the first; null: none
  std::unique_ptr<ranks::Leader> leader;      // null: one rank
  std::unique_ptr<kernels::Backend> backend;
  std::string collectives;  // as ServerDescription.collectives
};

// Of process 0: waits for the other ranks. `credentials`: of their service. Errors as Leader::Form.
absl::StatusOr<Compute> CreateCompute(const ServerOptions& options,
                                      const std::shared_ptr<grpc::ServerCredentials>& credentials);

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_COMPUTE_H_
