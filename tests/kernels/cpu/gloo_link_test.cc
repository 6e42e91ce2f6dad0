// SPDX-License-Identifier: Apache-2.0
// Links of several ranks in one process, over the loopback: what a chunk of a head that is split by
// vocabulary comes to when another rank does not do its part. What it comes to when all do is in the
// conformance suite.
#include "kernels/cpu/gloo_link.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/kernels/chunk_run.h"
#include "tests/kernels/problem.h"

namespace lossd::kernels::testing::gloo_link_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Ranks with a head each, joined.
class GlooLinkTest : public ::testing::Test {
 protected:
  struct Rank {
    std::unique_ptr<RankLink> link;
    std::unique_ptr<Backend> backend;
    std::unique_ptr<HeadKernels> head;
    std::vector<std::string> failures;  // that WatchChunks has told
  };

  GlooLinkTest() {
    ProblemSpec spec;
    spec.config.hidden_size = 6;
    spec.config.vocab_size = 20;
    spec.config.split = Split::kVocabulary;
    spec.slice_rows = {9};
    problem_ = MakeProblem(spec, rng_);
  }
  ~GlooLinkTest() override {
    for (Rank& rank : ranks_) rank.head.reset();
  }

  void Start(int count, absl::Duration timeout) {
    ranks_.resize(static_cast<size_t>(count));
    std::vector<std::string> addresses;
    for (int i = 0; i < count; ++i) {
      Rank& rank = ranks_[static_cast<size_t>(i)];
      rank.backend = CreateCpuBackend({.threads = 1, .replica = {i, count}}).value();
      rank.link = CreateGlooLink({i, count}, "127.0.0.1", timeout).value();
      addresses.push_back(rank.link->Address().value());
    }
    ForAll([&](Rank& rank) { EXPECT_TRUE(rank.link->Connect(addresses).ok()); });
    for (Rank& rank : ranks_) {
      rank.head = rank.backend->CreateHead(problem_.config).value();
      ASSERT_TRUE(rank.link->JoinClasses(rank.head.get()).ok());
      rank.link->WatchChunks([&rank](const absl::Status& failure) {
        rank.failures.emplace_back(failure.message());
        return absl::UnavailableError(absl::StrCat("the watcher's words, ", rank.failures.size()));
      });
    }
  }

  void ForAll(const std::function<void(Rank&)>& run) {
    std::vector<std::thread> threads;
    for (Rank& rank : ranks_) threads.emplace_back([&run, &rank] { run(rank); });
    for (std::thread& thread : threads) thread.join();
  }

  Rng rng_ = FreshRng();
  Problem problem_;
  std::vector<Rank> ranks_;
};

TEST_F(GlooLinkTest, AChunkThatAllTakePartInIsToldToNobody) {
  Start(3, absl::Minutes(1));
  ForAll([this](Rank& rank) { EXPECT_TRUE(RunChunk(*rank.head, problem_).done.ok()); });
  for (const Rank& rank : ranks_) {
    EXPECT_TRUE(rank.failures.empty());
    const ExchangeTimes times = rank.link->Times();
    EXPECT_GT(times[static_cast<size_t>(ExchangeKind::kRowStatistics)], absl::ZeroDuration());
    EXPECT_GT(times[static_cast<size_t>(ExchangeKind::kHiddenGradients)], absl::ZeroDuration());
    EXPECT_EQ(times[static_cast<size_t>(ExchangeKind::kSumGradients)], absl::ZeroDuration());
    EXPECT_EQ(times[static_cast<size_t>(ExchangeKind::kSpreadValues)], absl::ZeroDuration());
  }
}

// An operator is to see who waits for whom.
TEST_F(GlooLinkTest, TheWaitForARankThatComesLateCounts) {
  constexpr absl::Duration kLate = absl::Milliseconds(100);
  Start(2, absl::Minutes(1));
  const auto row_statistics = [this](size_t rank) {
    return ranks_[rank].link->Times()[static_cast<size_t>(ExchangeKind::kRowStatistics)];
  };
  std::thread waits([this] { EXPECT_TRUE(RunChunk(*ranks_[0].head, problem_).done.ok()); });
  while (row_statistics(0) == absl::ZeroDuration()) absl::SleepFor(absl::Milliseconds(1));
  absl::SleepFor(kLate);
  EXPECT_TRUE(RunChunk(*ranks_[1].head, problem_).done.ok());
  waits.join();
  EXPECT_GE(row_statistics(0), kLate);
}

TEST_F(GlooLinkTest, ARankThatHangsIsNamedAndTheChunkFailsWithWhatTheWatcherSays) {
  Start(3, absl::Seconds(2));
  std::vector<std::thread> threads;
  for (size_t i : {0, 2}) {
    threads.emplace_back([this, i] {
      const ChunkRun run = RunChunk(*ranks_[i].head, problem_);
      EXPECT_EQ(run.results, absl::UnavailableError("the watcher's words, 1"));
      EXPECT_EQ(run.done, absl::UnavailableError("the watcher's words, 1"));
    });
  }
  for (std::thread& thread : threads) thread.join();
  // Whichever notices first closes its connections, which the other one may notice before its own time is up.
  EXPECT_THAT(ranks_[0].failures, ElementsAre(HasSubstr("rank 0 could not receive from rank ")));
  EXPECT_THAT(ranks_[2].failures, ElementsAre(HasSubstr("rank 2 could not receive from rank ")));
  EXPECT_THAT(ranks_[0].failures[0] + ranks_[2].failures[0], HasSubstr("from rank 1"));
  // From then on nothing is sent: a chunk fails at once, with the first failure.
  const std::string first = ranks_[0].failures[0];
  EXPECT_EQ(RunChunk(*ranks_[0].head, problem_).done, absl::UnavailableError("the watcher's words, 2"));
  EXPECT_THAT(ranks_[0].failures, ElementsAre(first, first));
}

TEST_F(GlooLinkTest, AChunkThatWaitsEndsWhenTheLinkIsAborted) {
  Start(2, absl::Hours(1));
  absl::Notification ended;
  std::thread waits([&] {
    EXPECT_EQ(RunChunk(*ranks_[0].head, problem_).done, absl::UnavailableError("the watcher's words, 1"));
    ended.Notify();
  });
  // Before the chunk has come to the exchange or in it: either ends it.
  absl::SleepFor(absl::Milliseconds(rng_() % 30));
  ranks_[0].link->Abort(absl::UnavailableError("rank 1 is lost"));
  waits.join();
  EXPECT_THAT(ranks_[0].failures, ElementsAre("rank 1 is lost"));
}

TEST_F(GlooLinkTest, OnlyHeadsThatAreSplitByVocabularyAreJoined) {
  Start(2, absl::Minutes(1));
  HeadConfig by_rows = problem_.config;
  by_rows.split = Split::kRows;
  const auto head = ranks_[0].backend->CreateHead(by_rows).value();
  const absl::Status status = ranks_[0].link->JoinClasses(head.get());
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("split must be vocabulary"), HasSubstr("rows")));
}

TEST_F(GlooLinkTest, ItCarriesItsCollectivesItself) {
  Start(2, absl::Minutes(1));
  EXPECT_THAT(ranks_[0].link->CollectivesOffered(), ElementsAre("gloo"));
  EXPECT_TRUE(ranks_[0].link->UseCollectives("gloo").ok());
  const absl::Status status = ranks_[0].link->UseCollectives("nccl");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("collectives must be gloo"), HasSubstr("nccl")));
}

}  // namespace
}  // namespace lossd::kernels::testing::gloo_link_test
