// SPDX-License-Identifier: Apache-2.0
// The service's own threads, in addition to gRPC's callback threads and the engine's threads. Calls that
// block and large writes to the transport run here. WorkerPool runs tasks in order. AdminWorkers runs the
// calls of HeadService, and shares its threads fairly among heads and peers. Pulse finds out whether gRPC's
// threads answer.
//
// All classes are thread-safe.
#ifndef LOSSD_SERVER_RPC_WORKERS_H_
#define LOSSD_SERVER_RPC_WORKERS_H_

#include <grpcpp/server_builder.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"
#include "proto/wire/region_packets.h"
#include "server/engine/staging.h"

namespace lossd::rpc {

// Threads that run what must not run on gRPC's callback threads or on the engine's threads: calls that block,
// and writes to the transport. WorkerPool runs tasks in order; AdminWorkers runs the calls of HeadService and
// shares its threads fairly among heads and peers.
//
// Both classes are thread-safe.

// A fixed number of threads that run tasks in order of submission.
class WorkerPool {
 public:
  using Task = absl::AnyInvocable<void()>;

  WorkerPool(int threads, size_t max_queued_tasks);
  // Runs what is queued, then joins.
  ~WorkerPool() { Stop(); }
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // Runs `task` on one of the threads, in order of submission. False, without running it, if the queue
  // is full or the pool has stopped.
  bool Schedule(Task task) ABSL_LOCKS_EXCLUDED(mutex_);
  // Takes no more tasks, runs the queued ones and joins the threads.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopped_ || !tasks_.empty(); }
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);

  const size_t max_queued_tasks_;
  absl::Mutex mutex_;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

// What a task of AdminWorkers does, which decides how it shares the threads.
enum class AdminKind : uint8_t {
  kLook,    // reads what is known without the device: DescribeHead, PlanHead, ListHeads
  kList,    // reads the disk: ListCheckpoints
  kRead,    // reads a head on the device, or uses the disk: GradNorm, DeleteCheckpoint
  kChange,  // changes a head: ApplyStep, ZeroGradients, DeleteHead
  kLong,    // changes a head and takes long: CreateHead, ResetHead, SetShares, LoadCheckpoint
  kRows,    // moves some rows of a tensor
};

// The peer, head and kind of a task. An empty string: the task belongs to no peer, or to no single head.
struct AdminTask {
  std::string peer;
  std::string head;
  AdminKind kind = AdminKind::kLook;
};

struct AdminWorkersOptions {
  int threads = 8;  // at least 2
  int64_t max_waiting = 256;
  double peer_share = 0.5;  // the part of max_waiting that one peer may have
  std::function<void(absl::string_view limit)> on_limit = [](absl::string_view) {};  // a task was refused
};

// The threads that run HeadService's calls, which block: on the device, on a head's lock, on the disk. No
// peer, no head and no kind of long task can use all threads. The rules:
//
//   - tasks that only look (kLook, kList) have two threads of their own, which run no long tasks; at most one
//     kList task runs at a time, and peers take turns, however many tasks each has waiting;
//   - for one head, at most one task that changes it runs at a time (such tasks would wait for each other
//     anyway), at most two tasks that read it, and at most kRowsOfHead tasks that move rows of tensors;
//   - long tasks (kLong) together have at most half of the threads;
//   - tasks of one peer have at most half of the threads, and at most the share of the places in the queue
//     that engine::FairShare gives.
//
// Among the tasks that these rules allow, the task whose peer has the fewest running tasks goes first, and
// among several such tasks the oldest one.
class AdminWorkers {
 public:
  using Work = absl::AnyInvocable<void()>;
  static constexpr int kRowsOfHead = 3;

  explicit AdminWorkers(const AdminWorkersOptions& options);
  // Runs what is queued, then joins.
  ~AdminWorkers();
  AdminWorkers(const AdminWorkers&) = delete;
  AdminWorkers& operator=(const AdminWorkers&) = delete;

  // Queues `work` for a thread. RESOURCE_EXHAUSTED if too many tasks wait, in all or of this peer: then
  // `work` does not run, and the error names the limit and its flag.
  absl::Status Schedule(const AdminTask& task, Work work) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Queued {
    AdminTask task;
    Work work;
  };
  using Queue = std::list<Queued>;

  void Run(bool looks) ABSL_LOCKS_EXCLUDED(mutex_);
  // The task that a thread runs next; end() if there is none. `looks`: the thread runs only tasks that look.
  Queue::iterator Next(bool looks) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Queue::iterator NextLook() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // A task of the peer that looks begins: such tasks of other peers go before its next one.
  void TookTurn(const std::string& peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool MayRun(const AdminTask& task) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasLook() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return HasWork(true); }
  bool HasOther() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return HasWork(false); }
  bool HasWork(bool looks) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Count(const AdminTask& task, int change) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int64_t Running(const std::string& key) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const AdminWorkersOptions options_;
  absl::Mutex mutex_;
  Queue queue_ ABSL_GUARDED_BY(mutex_);
  engine::FairShare waiting_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, int64_t> running_ ABSL_GUARDED_BY(mutex_);  // above 0, by the key of a limit
  // For each peer with waiting tasks that look: when its last such task began, as a number of last_turn_.
  std::map<std::string, uint64_t> turns_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_turn_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

// Pulse finds out whether gRPC's threads answer. The server keeps a connection to itself, and Pulse asks gRPC
// for a sign of life over this connection every second. The question passes through the same threads as the
// calls of clients, which read and write connections.
//
// Pulse is thread-safe.

// Runs a function again and again, on a thread of its own, until the object is destroyed.
class Periodic {
 public:
  // The first run is after one `pause`. `run` must be quick: the destructor waits for it.
  Periodic(absl::Duration pause, absl::AnyInvocable<void()> run)
      : thread_([this, pause, run = std::move(run)]() mutable {
          while (!stopping_.AwaitFor(pause)) run();
        }) {}
  ~Periodic() {
    stopping_.Notify();
    thread_.join();
  }

 private:
  clocks::Event stopping_;
  std::thread thread_;
};

class Pulse {
 public:
  // Prepares `builder` to take the connection of the Pulse. Call it before the server is built.
  explicit Pulse(grpc::ServerBuilder* builder);

  // Begins to ask. Call it when the server is built.
  void Start();
  // Ends the questions; Silence is zero from then on. Call it before the server shuts down. May be repeated.
  void Stop();

  // The time since gRPC last answered; zero before Start and after Stop.
  absl::Duration Silence() const { return watched_ ? beat_.Silence() : absl::ZeroDuration(); }

 private:
  bool Connect();
  void Ask();
  void ReadAnswers();

  const std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> taker_;
  wire::OwnedDescriptor socket_;
  std::string unread_;  // bytes of a frame that has not arrived completely
  int unanswered_ = 0;  // questions without an answer
  std::atomic<bool> watched_{false};
  clocks::Heartbeat beat_;
  std::optional<Periodic> thread_;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_WORKERS_H_
