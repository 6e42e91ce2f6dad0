// SPDX-License-Identifier: Apache-2.0
// A worker: a rank that is not the leader. It joins the leader, and computes what the leader asks of it until
// one of the two ends. worker_heads.h carries out requests and chunks, files.h the requests that concern
// files.
//
// Thread-safe.
#ifndef LOSSD_SERVER_RANKS_WORKER_H_
#define LOSSD_SERVER_RANKS_WORKER_H_

#include <grpcpp/security/credentials.h>

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/create_backend.h"
#include "kernels/rank_link.h"
#include "server/ranks/channel.h"
#include "server/ranks/files.h"
#include "server/ranks/start.h"

namespace lossd::ranks {

struct WorkerOptions {
  int rank = 1;
  std::string leader;  // "host:port", or Leader::local_address
  std::shared_ptr<grpc::ChannelCredentials> credentials;
  std::string secret;
  ChannelLimits limits;
  Settings settings;                          // but those of the backend
  WorkerFilesOptions files = {};              // but the rank
  absl::Duration timeout = absl::Minutes(5);  // for the leader to take this rank
  // Called once, when joined() becomes true, on the driving thread; must not call into the worker.
  std::function<void()> on_joined = [] {};
  // What a scrape of this rank would give, which the leader shows beside its own: asked for every
  // `metrics_interval` once joined, on a thread of the worker's. At most kMostMetricsBytes (worker_stream.h).
  std::function<v1::Metrics()> metrics = nullptr;
  absl::Duration metrics_interval = absl::Seconds(2);
};

class Worker {
 public:
  static std::unique_ptr<Worker> Create(const WorkerOptions& options, kernels::CreatedBackend own);
  // Leave first, or let Run end. Closes it.
  virtual ~Worker() = default;

  // Returns when the worker's part is over:
  // OK: the leader has ended the ranks, or this one left before it had joined.
  // INVALID_ARGUMENT: the ranks do not agree. DEADLINE_EXCEEDED: the leader was not reached; and other codes,
  // where the ranks did not come together. UNAVAILABLE once joined(): the leader or this rank's device is
  // lost. Then the backend may hang, and the process had better end without taking it down.
  virtual absl::Status Run() = 0;

  // After Run: closes the stream, which the leader may wait for, and ends the worker's threads. Whatever this
  // rank waits for of others is given up if Run has failed.
  virtual void Close() = 0;

  // Asks the leader to end all ranks. Does not wait.
  virtual void Leave(const std::string& reason) = 0;
  // Has the leader hear that the device is lost.
  virtual void ReportLoss(const absl::Status& status) = 0;

  // All ranks are connected.
  virtual bool joined() const = 0;
  // How long the driving thread has been at what the leader asked for last: the creation of a head, a step, a
  // sum with other ranks, the submission of a chunk. 0 while it waits to be asked. Takes no lock.
  virtual absl::Duration Silence() const = 0;
  virtual kernels::RankTimes times() const = 0;
};

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_WORKER_H_
