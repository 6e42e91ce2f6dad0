// SPDX-License-Identifier: Apache-2.0
// What a server of several ranks is put together from: the leader and the workers, as the options have them.
//
// Stateless; thread-safe.
#ifndef LOSSD_SERVER_APP_RANK_PARTS_H_
#define LOSSD_SERVER_APP_RANK_PARTS_H_

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

// INVALID_ARGUMENT if all processes, each with so many devices, would have too many ranks.
absl::Status CheckRankCount(const ServerOptions& options, int devices);

// The address of this host that the other ranks reach.
absl::StatusOr<std::string> RankHost(const ServerOptions& options);

// Of process 0: listens for the other ranks. `devices`: of each process. `credentials`: of the ranks'
// service.
absl::StatusOr<std::unique_ptr<ranks::Leader>> StartLeader(
    const ServerOptions& options, int devices, const std::shared_ptr<grpc::ServerCredentials>& credentials);

// A rank other than 0; as ranks::WorkerOptions.
struct WorkerSpec {
  int rank = 1;
  int devices = 1;            // of each process
  std::string local_address;  // Leader::local_address, in the leader's process
  std::function<void()> on_joined;
  std::function<ranks::v1::Metrics()> metrics;
};

absl::StatusOr<std::unique_ptr<ranks::Worker>> CreateWorker(const ServerOptions& options, WorkerSpec spec,
                                                            kernels::CreatedBackend own);

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_RANK_PARTS_H_
