// SPDX-License-Identifier: Apache-2.0
// RankGroup: a group of ranks for tests. The leader is in this process; the workers are in processes of their
// own, or on threads of this process.
#ifndef LOSSD_TESTS_SERVER_RANKS_RANK_GROUP_H_
#define LOSSD_TESTS_SERVER_RANKS_RANK_GROUP_H_

#include <gtest/gtest.h>
#include <signal.h>

#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/ranks/leader.h"
#include "server/ranks/worker.h"
#include "tests/server/ranks/rank_backend.h"
#include "tests/support/server_process.h"

namespace lossd::ranks::testing {

// A rank on threads of the test's own process, like a process's second and later devices. Not thread-safe,
// except worker().
class ThreadWorker {
 public:
  // Joins the leader: ranks with an odd number as the second device of a process of two, the others over the
  // loopback.
  ThreadWorker(Leader& leader, const RankSpec& spec, const ChannelLimits& limits,
               const Settings& settings = {}) {
    signal(SIGPIPE, SIG_IGN);  // as programs do, because another rank may close its connections
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
  // Waits for the end of Run, and returns its status.
  absl::Status AwaitEnd() {
    if (thread_.joinable()) thread_.join();
    return end_;
  }

 private:
  std::unique_ptr<Worker> worker_;
  absl::Status end_;  // the thread writes it; read it only after join
  std::thread thread_;
};

// LOSSD_RANK_WORKER: the path of the worker program, if tests were moved after the build; "" if they were
// built for workers on threads.
// LOSSD_RANK_SHARED_MEMORY: whether rows lie in memory that the ranks share; "yes" by default.
inline bool SharesRows() { return FromEnvironment("LOSSD_RANK_SHARED_MEMORY", "yes") == "yes"; }

inline std::string RankWorker() { return FromEnvironment("LOSSD_RANK_WORKER", LOSSD_RANK_WORKER_PROCESS); }

inline bool OnThreads() { return RankWorker().empty(); }

class RankGroup {
 public:
  // Chunks of at least `least_rows` rows are divided. `workspace_bytes` is for each rank. `way`: see
  // RankSpec::way.
  RankGroup(int ranks, int64_t least_rows, int64_t workspace_bytes, const std::string& way = "") {
    // Ranks may share a GPU here. Processes with several devices refuse that.
    auto leader = Leader::Start({.ranks = ranks,
                                 .devices = OnThreads() && RankBackend() == "cpu" ? 2 : 1,
                                 .host = "127.0.0.1",
                                 .credentials = grpc::InsecureServerCredentials(),
                                 .limits = kLimits,
                                 .group = {.least_rows = least_rows},
                                 .share_rows = SharesRows()});
    EXPECT_TRUE(leader.ok()) << leader.status();
    leader_ = *std::move(leader);
    for (int rank = 1; rank < ranks; ++rank) {
      if (OnThreads()) {
        threads_.push_back(
            std::make_unique<ThreadWorker>(*leader_, RankSpec{rank, ranks, workspace_bytes, way}, kLimits));
        continue;
      }
      workers_.push_back(std::make_unique<test::ChildProcess>(std::vector<std::string>{
          RankWorker(), absl::StrCat(rank), absl::StrCat(ranks), absl::StrCat("127.0.0.1:", leader_->port()),
          absl::StrCat(workspace_bytes), way}));
    }
    auto own = MakeRankBackend({.rank = 0, .ranks = ranks, .workspace_bytes = workspace_bytes, .way = way});
    EXPECT_TRUE(own.ok()) << own.status();
    auto backend = leader_->Form(*std::move(own));
    EXPECT_TRUE(backend.ok()) << backend.status();
    if (!backend.ok()) return;
    backend_ = *std::move(backend);
    auto rows = backend_->AllocateStaging(kRowBytes);
    EXPECT_TRUE(rows.ok()) << rows.status();
    if (rows.ok()) rows_ = *std::move(rows);
  }

  Leader& leader() { return *leader_; }
  kernels::Backend& backend() { return *backend_; }
  // The group's staging memory.
  absl::Span<uint8_t> rows() { return rows_->bytes(); }
  // The number of shared memory regions that a rank (1 or above) has mapped.
  int Mappings(int rank) {
    std::ifstream maps(absl::StrCat("/proc/", worker(rank).pid(), "/maps"));
    int count = 0;
    for (std::string line; std::getline(maps, line);) {
      if (line.find("memfd:lossd-region") != std::string::npos) ++count;
    }
    return count;
  }
  // The process of a rank (1 or above), if ranks are processes.
  test::ChildProcess& worker(int rank) { return *workers_[static_cast<size_t>(rank) - 1]; }
  // The threads of a rank (1 or above), if ranks are threads.
  ThreadWorker& thread(int rank) { return *threads_[static_cast<size_t>(rank) - 1]; }
  // Ends all ranks. Returns the exit statuses of the workers.
  std::vector<int> End() {
    rows_.reset();
    backend_.reset();
    leader_.reset();
    std::vector<int> ends;
    for (const auto& worker : threads_) ends.push_back(worker->AwaitEnd().ok() ? 0 : 3);
    for (const auto& worker : workers_) ends.push_back(worker->WaitFor(absl::Minutes(2)));
    return ends;
  }

 private:
  static constexpr int64_t kRowBytes = int64_t{8} << 20;

  static constexpr ChannelLimits kLimits = {.slice_bytes = 64 << 20};

  std::vector<std::unique_ptr<ThreadWorker>> threads_;
  std::vector<std::unique_ptr<test::ChildProcess>> workers_;
  std::unique_ptr<Leader> leader_;
  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<kernels::StagingMemory> rows_;
};

}  // namespace lossd::ranks::testing

#endif  // LOSSD_TESTS_SERVER_RANKS_RANK_GROUP_H_
