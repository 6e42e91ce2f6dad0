// SPDX-License-Identifier: Apache-2.0
// A group of ranks for tests: the leader in this process, the workers in processes of their own.
#ifndef LOSSD_TESTS_SERVER_RANKS_RANK_GROUP_H_
#define LOSSD_TESTS_SERVER_RANKS_RANK_GROUP_H_

#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/ranks/leader.h"
#include "tests/server/ranks/rank_backend.h"
#include "tests/support/child_process.h"

namespace lossd::ranks::testing {

// LOSSD_RANK_WORKER: the program, where tests do not lie where they were built.
// LOSSD_RANK_SHARED_MEMORY: whether rows lie in memory that the ranks share; "yes" by default.
inline bool SharesRows() { return FromEnvironment("LOSSD_RANK_SHARED_MEMORY", "yes") == "yes"; }

inline std::string RankWorker() { return FromEnvironment("LOSSD_RANK_WORKER", LOSSD_RANK_WORKER_PROCESS); }

class RankGroup {
 public:
  // Chunks of at least `least_rows` are divided. `workspace_bytes`: of each rank. `way`: RankSpec::way.
  RankGroup(int ranks, int64_t least_rows, int64_t workspace_bytes, const std::string& way = "") {
    auto leader = Leader::Start({.ranks = ranks,
                                 .listen = "127.0.0.1:0",
                                 .credentials = grpc::InsecureServerCredentials(),
                                 .limits = {.slice_bytes = 64 << 20},
                                 .group = {.least_rows = least_rows},
                                 .share_rows = SharesRows()});
    EXPECT_TRUE(leader.ok()) << leader.status();
    leader_ = *std::move(leader);
    for (int rank = 1; rank < ranks; ++rank) {
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
  // Staging memory of the group.
  absl::Span<uint8_t> rows() { return rows_->bytes(); }
  // How many pieces of shared memory rank 1 and so on has mapped.
  int Mappings(int rank) {
    std::ifstream maps(absl::StrCat("/proc/", worker(rank).pid(), "/maps"));
    int count = 0;
    for (std::string line; std::getline(maps, line);) {
      if (line.find("memfd:lossd-region") != std::string::npos) ++count;
    }
    return count;
  }
  // Of rank 1 and so on.
  test::ChildProcess& worker(int rank) { return *workers_[static_cast<size_t>(rank) - 1]; }
  // Ends all ranks. The exit statuses of the workers.
  std::vector<int> End() {
    rows_.reset();
    backend_.reset();
    leader_.reset();
    std::vector<int> ends;
    for (const auto& worker : workers_) ends.push_back(worker->WaitFor(absl::Minutes(2)));
    return ends;
  }

 private:
  static constexpr int64_t kRowBytes = int64_t{8} << 20;

  std::vector<std::unique_ptr<test::ChildProcess>> workers_;
  std::unique_ptr<Leader> leader_;
  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<kernels::StagingMemory> rows_;
};

}  // namespace lossd::ranks::testing

#endif  // LOSSD_TESTS_SERVER_RANKS_RANK_GROUP_H_
