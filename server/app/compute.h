// SPDX-License-Identifier: Apache-2.0
// What computes: the backend of this process, alone or with those of the other ranks.
//
// Stateless; thread-safe.
#ifndef LOSSD_SERVER_APP_COMPUTE_H_
#define LOSSD_SERVER_APP_COMPUTE_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/create_backend.h"
#include "server/app/server.h"
#include "server/ranks/leader.h"
#include "server/ranks/worker.h"

namespace lossd::app {

// INVALID_ARGUMENT naming the option if what is said of ranks is not in order, or would let others reach them
// who may not.
absl::Status CheckRanks(const ServerOptions& options);

// The backend of this process.
absl::StatusOr<kernels::CreatedBackend> CreateOwnBackend(const ServerOptions& options);

struct Compute {
  std::unique_ptr<ranks::Leader> leader;  // null: one rank. Outlives the backend
  std::unique_ptr<kernels::Backend> backend;
  std::string collectives;  // as ServerDescription.collectives
};

// Of rank 0: waits for the other ranks. `credentials`: of their service. Errors as Leader::Form.
absl::StatusOr<Compute> CreateCompute(const ServerOptions& options,
                                      const std::shared_ptr<grpc::ServerCredentials>& credentials);

// As in ranks::WorkerOptions.
struct WorkerCallbacks {
  std::function<void()> on_joined;
  std::function<ranks::v1::Metrics()> metrics;
};

// Of the other ranks.
absl::StatusOr<std::unique_ptr<ranks::Worker>> CreateWorker(const ServerOptions& options,
                                                            kernels::CreatedBackend own,
                                                            WorkerCallbacks callbacks);

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_COMPUTE_H_
