// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/heads/cuda_link.h"

namespace lossd::kernels::cuda::rank_class_exchange_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Notes what it is asked for.
class NotedCollectives final : public Collectives {
 public:
  explicit NotedCollectives(int rank) : rank_(rank) {}
  int members() const override { return 3; }
  int first_member() const override { return rank_; }
  absl::Status Sum(const std::vector<Part>&, int64_t floats, int root) override {
    return Note(absl::StrCat("sum of ", floats, " at ", root));
  }
  absl::Status Spread(const std::vector<Part>&, DType, int64_t, int) override { return Note("spread"); }
  absl::Status Enqueue(absl::FunctionRef<absl::Status()> exchange) override { return exchange(); }
  absl::Status Wait(const std::vector<Part>&) override { return failed; }
  absl::Status SumOfAll(const Part&, int64_t floats) override {
    return Note(absl::StrCat("sum of ", floats));
  }
  absl::Status Gather(const Part&, const void*, int64_t bytes) override {
    return Note(absl::StrCat("gather of ", bytes));
  }
  absl::Status Wait(int, cudaEvent_t) override { return failed; }
  absl::Status Abort(absl::Status reason) override {
    failed.Update(reason);
    return failed;
  }
  absl::Status failure() const override { return failed; }

  std::vector<std::string> calls;
  absl::Status failed;

 private:
  absl::Status Note(std::string call) {
    calls.push_back(std::move(call));
    return failed;
  }

  const int rank_;
};

class RankClassExchangeTest : public ::testing::Test {
 protected:
  struct Rank {
    explicit Rank(int rank, const OnChunkFailure* on_failure)
        : collectives(std::make_shared<NotedCollectives>(rank)),
          exchange(collectives, nullptr, &timer, on_failure) {}
    ExchangeClocks clocks;
    StreamTimer timer{&clocks};
    std::shared_ptr<NotedCollectives> collectives;
    RankClassExchange exchange;
  };

  std::vector<std::string> told_;
  OnChunkFailure on_failure_ = [this](const absl::Status& failure) {
    told_.emplace_back(failure.message());
    return absl::UnavailableError("rank 1 is lost");
  };
  const Event event_;
};

TEST_F(RankClassExchangeTest, AllRowsBecomeCompleteAtRankZero) {
  float rows[1] = {};
  for (int rank = 0; rank < 3; ++rank) {
    Rank one(rank, &on_failure_);
    const RowRange here = one.exchange.RowsHere(40);
    EXPECT_EQ(here.end, 40);
    EXPECT_EQ(here.begin, rank == 0 ? 0 : 40);
    EXPECT_TRUE(one.exchange.SumRows(rows, 40, 72).ok());
    EXPECT_TRUE(one.exchange.Sum(ExchangeKind::kHiddenGradients, rows, 5).ok());
    EXPECT_TRUE(one.exchange.Gather(rows, rows, 16).ok());
    EXPECT_THAT(one.collectives->calls, ElementsAre("sum of 2880 at 0", "sum of 5", "gather of 16"));
    EXPECT_TRUE(one.exchange.Wait(event_).ok());
  }
  EXPECT_THAT(told_, IsEmpty());
}

TEST_F(RankClassExchangeTest, AChunkFailsWithWhatTheWatcherSays) {
  Rank rank(0, &on_failure_);
  rank.collectives->failed = absl::UnavailableError("rank 0 could not receive from rank 1");
  EXPECT_EQ(rank.exchange.Wait(event_), absl::UnavailableError("rank 1 is lost"));
  EXPECT_THAT(told_, ElementsAre("rank 0 could not receive from rank 1"));
}

// So that the others need not wait until their time is up.
TEST_F(RankClassExchangeTest, APartThatFailsAloneIsTold) {
  Rank rank(1, &on_failure_);
  rank.exchange.Abort(absl::ResourceExhaustedError("no memory"));
  EXPECT_EQ(rank.collectives->failed, absl::UnavailableError("a part of the head failed: no memory"));
  EXPECT_THAT(told_, ElementsAre("a part of the head failed: no memory"));
}

TEST_F(RankClassExchangeTest, WithoutAWatcherItIsTheFailureItself) {
  const OnChunkFailure none;
  Rank rank(0, &none);
  rank.collectives->failed = absl::UnavailableError("late");
  EXPECT_EQ(rank.exchange.Wait(event_), absl::UnavailableError("late"));
}

}  // namespace
}  // namespace lossd::kernels::cuda::rank_class_exchange_test
