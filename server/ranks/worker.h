// SPDX-License-Identifier: Apache-2.0
// A worker: a rank that is not the leader. It joins the leader, and computes what the leader asks of it until
// one of the two ends. worker_heads.h carries out requests and chunks, files.h the requests that concern
// files.
//
// Thread-safe.
#ifndef LOSSD_SERVER_RANKS_WORKER_H_
#define LOSSD_SERVER_RANKS_WORKER_H_

#include <grpcpp/security/credentials.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "kernels/clocks/clock.h"
#include "kernels/create_backend.h"
#include "kernels/exchange_times.h"
#include "kernels/rank_link.h"
#include "lossd/ranks/v1/ranks.pb.h"
#include "server/ranks/channel.h"
#include "server/ranks/files.h"
#include "server/ranks/start.h"
#include "server/ranks/worker_heads.h"

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
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Returns when the worker's part is over:
  // OK: the leader has ended the ranks, or this one left before it had joined.
  // INVALID_ARGUMENT: the ranks do not agree. DEADLINE_EXCEEDED: the leader was not reached; and other codes,
  // where the ranks did not come together. UNAVAILABLE once joined(): the leader or this rank's device is
  // lost. Then the backend may hang, and the process had better end without taking it down.
  absl::Status Run();

  // After Run: closes the stream, which the leader may wait for, and ends the worker's threads. Whatever this
  // rank waits for of others is given up if Run has failed.
  void Close();

  // Asks the leader to end all ranks. Does not wait.
  void Leave(const std::string& reason);
  // Has the leader hear that the device is lost.
  void ReportLoss(const absl::Status& status);

  // All ranks are connected.
  bool joined() const { return joined_; }
  // How long the driving thread has been at what the leader asked for last: the creation of a head, a step, a
  // sum with other ranks, the submission of a chunk. 0 while it waits to be asked. Takes no lock.
  absl::Duration Silence() const {
    const Clock::time_point since = busy_since_;
    return since == kIdle ? absl::ZeroDuration() : absl::FromChrono(Clock::now() - since);
  }
  kernels::RankTimes times() const { return {busy_.Total(), link_->Times()}; }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr Clock::time_point kIdle = Clock::time_point::max();
  struct Attempt;

  Worker(const WorkerOptions& options, kernels::CreatedBackend own);

  absl::Status Join();
  absl::Status TryToJoin(v1::ToWorker* first);
  v1::FromWorker Hello() const;
  absl::Status Serve(v1::ToWorker message);
  // ---- On the driving thread ----
  void Drive();
  absl::Status Handle(v1::ToWorker& message);
  absl::Status OnSlice(v1::ChunkSlice* slice);
  absl::Status SubmitIfComplete();
  absl::Status OnChunkFailure(const absl::Status& failure);
  void Write();
  void ReportMetrics();

  const WorkerOptions options_;
  const std::unique_ptr<kernels::Backend> backend_;
  const std::unique_ptr<kernels::RankLink> link_;
  // What the driving thread does: what the leader asks for, or a part of the work on files.
  struct Work {
    v1::ToWorker message = {};
    std::function<void()> task = nullptr;
  };

  ThreadQueue<Work> requests_;           // bounded: the leader waits for answers, and sends so many chunks
  ThreadQueue<v1::FromWorker> answers_;  // likewise
  kernels::BusyClock busy_;              // of chunks and requests
  WorkerHeads heads_;
  WorkerFiles files_;
  absl::Status failure_;                 // of Run
  std::string refusal_;                  // the last time that another process had this rank
  std::optional<v1::ChunkStart> chunk_;  // of which slices are still to come
  std::vector<v1::ChunkSlice> slices_;
  std::atomic<bool> joined_{false};
  std::atomic<Clock::time_point> busy_since_{kIdle};  // of the driving thread
  std::atomic<bool> leaving_{false};
  std::atomic<bool> metrics_wait_{false};  // to be written
  clocks::Event stopping_;
  absl::Mutex attempt_mutex_;
  std::unique_ptr<Attempt> attempt_ ABSL_GUARDED_BY(attempt_mutex_);
  std::thread driver_;
  std::thread writer_;
  std::thread reporter_;
};

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_WORKER_H_
