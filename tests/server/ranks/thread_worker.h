// SPDX-License-Identifier: Apache-2.0
// A rank on threads of the test's own process, as a device beside the first of a process is.
#ifndef LOSSD_TESTS_SERVER_RANKS_THREAD_WORKER_H_
#define LOSSD_TESTS_SERVER_RANKS_THREAD_WORKER_H_

#include <gtest/gtest.h>
#include <signal.h>

#include <memory>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/ranks/leader.h"
#include "server/ranks/worker.h"
#include "tests/server/ranks/rank_backend.h"

namespace lossd::ranks::testing {

// Not thread-safe, but for worker().
class ThreadWorker {
 public:
  // Joins the leader: ranks with an odd number as within a process of two, the others over the loopback.
  ThreadWorker(Leader& leader, const RankSpec& spec, const ChannelLimits& limits,
               const Settings& settings = {}) {
    signal(SIGPIPE, SIG_IGN);  // as programs do: another rank may close its connections
    auto backend = MakeRankBackend(spec);
    EXPECT_TRUE(backend.ok()) << backend.status();
    WorkerOptions options = {.rank = spec.rank,
                             .leader = absl::StrCat("127.0.0.1:", leader.port()),
                             .credentials = grpc::InsecureChannelCredentials(),
                             .limits = limits,
                             .settings = settings};
    if (spec.rank % 2 == 1 && !leader.local_address().empty()) options.leader = leader.local_address();
    worker_ = Worker::Create(options, *std::move(backend));
    thread_ = std::thread([this] {
      end_ = worker_->Run();
      worker_->Close();
    });
  }
  ~ThreadWorker() { AwaitEnd().IgnoreError(); }
  ThreadWorker(const ThreadWorker&) = delete;
  ThreadWorker& operator=(const ThreadWorker&) = delete;

  Worker& worker() { return *worker_; }
  // What Run has returned, once it has.
  absl::Status AwaitEnd() {
    if (thread_.joinable()) thread_.join();
    return end_;
  }

 private:
  std::unique_ptr<Worker> worker_;
  absl::Status end_;  // of the thread until it is joined
  std::thread thread_;
};

}  // namespace lossd::ranks::testing

#endif  // LOSSD_TESTS_SERVER_RANKS_THREAD_WORKER_H_
