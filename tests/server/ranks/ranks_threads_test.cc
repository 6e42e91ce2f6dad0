// SPDX-License-Identifier: Apache-2.0
// A leader and its workers on threads of one program, as far as the sanitizers see: training with figures
// read meanwhile, and every way in which such a group ends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "tests/kernels/chunk_run.h"
#include "tests/server/ranks/rank_group.h"

namespace lossd::ranks::testing::ranks_threads_test {
namespace {

using kernels::HeadKernels;
using kernels::Param;
using kernels::Role;
using kernels::Split;
using kernels::testing::FreshRng;
using kernels::testing::Problem;
using kernels::testing::Rng;
using kernels::testing::UniformInt;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr int64_t kWorkspace = int64_t{4} << 20;

Problem SomeProblem(Split split, Rng& rng) {
  kernels::testing::ProblemSpec spec =
      kernels::testing::RandomSpec(UniformInt(rng, 40, 90), UniformInt(rng, 1, 40), UniformInt(rng, 4, 200),
                                   kernels::DType::kBFloat16, kernels::DType::kFloat32, rng);
  spec.config.split = split;
  spec.config.optimizer_state = kernels::OptimizerState::kAdam;
  return kernels::testing::MakeProblem(spec, rng);
}

// A chunk, a step, and what reads and writes tensors. The first error.
absl::Status TrainOnce(HeadKernels& head, const Problem& problem, int64_t update) {
  absl::Status status = kernels::testing::RunChunk(head, problem).done;
  if (status.ok()) status = head.GradNorm().status();
  if (status.ok()) status = head.ApplyStep({}, update);
  if (status.ok()) status = head.ZeroGradients();
  const kernels::TensorShape shape = kernels::ShapeOf(head.config(), Param::kWeight);
  std::vector<uint8_t> bytes(static_cast<size_t>(shape.elements()) * sizeof(float));
  constexpr auto kFloat = kernels::DType::kFloat32;
  for (const Role role : {Role::kValue, Role::kMoment1}) {
    if (status.ok())
      status = head.ReadTensor({Param::kWeight, role}, 0, shape.rows, kFloat, absl::MakeSpan(bytes));
    if (status.ok()) status = head.WriteTensor({Param::kWeight, role}, 0, shape.rows, kFloat, bytes);
  }
  if (status.ok()) status = head.AddGradient(Param::kWeight, 0, shape.rows, kFloat, 0.5f, bytes);
  return status;
}

// Trains until something fails, while `meanwhile` runs on another thread; what failed.
absl::Status TrainUntilItFails(HeadKernels& head, const Problem& problem,
                               const std::function<void()>& meanwhile) {
  std::thread other(meanwhile);
  absl::Status status;
  for (int64_t update = 1; status.ok(); ++update) status = TrainOnce(head, problem, update);
  other.join();
  return status;
}

class RanksThreadsTest : public ::testing::TestWithParam<Split> {
 protected:
  void TearDown() override { kernels::testing::SetRowMemory({}); }
};

TEST_P(RanksThreadsTest, FiguresAreReadWhileTheyTrain) {
  Rng rng = FreshRng();
  RankGroup group(4, 0, kWorkspace);
  kernels::testing::SetRowMemory(group.rows());
  const Problem problem = SomeProblem(GetParam(), rng);
  auto head = MakeHead(group.backend(), problem);
  ASSERT_NE(head, nullptr);
  std::atomic<bool> trained{false};
  std::thread reader([&] {
    while (!trained) {
      for (const RankReport& report : group.leader().Reports()) EXPECT_FALSE(report.state.lost);
      EXPECT_GE(group.leader().times().busy, absl::ZeroDuration());
      for (int rank = 1; rank < 4; ++rank) {
        EXPECT_TRUE(group.thread(rank).worker().joined());
        EXPECT_GE(group.thread(rank).worker().Silence(), absl::ZeroDuration());
        EXPECT_GE(group.thread(rank).worker().times().busy, absl::ZeroDuration());
      }
      EXPECT_GT(group.backend().memory().peak_total, 0);
    }
  });
  for (int64_t update = 1; update <= 20; ++update) {
    EXPECT_TRUE(TrainOnce(*head, problem, update).ok());
  }
  trained = true;
  reader.join();
  head.reset();
  EXPECT_THAT(group.End(), Each(0));
}

// As a device that is lost: the others wait for it in sums and exchanges, and hear of it there.
TEST_P(RanksThreadsTest, ALostRankEndsAll) {
  Rng rng = FreshRng();
  for (int lost = 1; lost < 4; ++lost) {
    SCOPED_TRACE(lost);
    RankGroup group(4, 0, kWorkspace);
    kernels::testing::SetRowMemory(group.rows());
    absl::Mutex mutex;
    std::vector<std::string> heard;
    group.leader().WatchLoss([&](const absl::Status& status) {
      absl::MutexLock lock(&mutex);
      heard.emplace_back(status.message());
    });
    const Problem problem = SomeProblem(GetParam(), rng);
    auto head = MakeHead(group.backend(), problem);
    ASSERT_NE(head, nullptr);
    const absl::Duration after = absl::Microseconds(UniformInt(rng, 0, 30'000));
    const absl::Status failed = TrainUntilItFails(*head, problem, [&] {
      absl::SleepFor(after);
      group.thread(lost).worker().ReportLoss(absl::UnavailableError("the device of the test"));
    });
    // The other, if some ranks had accumulated their part of a chunk.
    EXPECT_THAT(failed.code(), AnyOf(absl::StatusCode::kUnavailable, absl::StatusCode::kDataLoss)) << failed;
    for (int rank = 1; rank < 4; ++rank) EXPECT_FALSE(group.thread(rank).AwaitEnd().ok()) << rank;
    head.reset();
    EXPECT_THAT(group.End(), Each(3));
    absl::MutexLock lock(&mutex);
    ASSERT_EQ(heard.size(), 1u);
    EXPECT_THAT(heard.front(), HasSubstr("the device of the test"));
  }
}

TEST_P(RanksThreadsTest, RanksThatAreAskedToStopSayItOnceAndEndWithTheLeader) {
  Rng rng = FreshRng();
  RankGroup group(3, 0, kWorkspace);
  kernels::testing::SetRowMemory(group.rows());
  std::atomic<int> asked{0};
  group.leader().WatchLeaving([&](const Leaving&) { ++asked; });
  const Problem problem = SomeProblem(GetParam(), rng);
  auto head = MakeHead(group.backend(), problem);
  ASSERT_NE(head, nullptr);
  std::thread stop([&] {
    for (int rank = 1; rank < 3; ++rank) group.thread(rank).worker().Leave("the test");
  });
  // They go on until the leader ends them.
  for (int64_t update = 1; asked == 0; ++update) EXPECT_TRUE(TrainOnce(*head, problem, update).ok());
  stop.join();
  EXPECT_TRUE(TrainOnce(*head, problem, 1).ok());
  head.reset();
  EXPECT_THAT(group.End(), Each(0));
  EXPECT_EQ(asked, 1);
}

INSTANTIATE_TEST_SUITE_P(Splits, RanksThreadsTest, ::testing::Values(Split::kRows, Split::kVocabulary),
                         [](const auto& split) { return std::string(Name(split.param)); });

// ---- Groups that do not come together ----

class FormingTest : public ::testing::Test {
 protected:
  FormingTest() {
    auto leader = Leader::Start({.ranks = 3,
                                 .devices = 2,
                                 .host = "127.0.0.1",
                                 .credentials = grpc::InsecureServerCredentials(),
                                 .limits = kLimits,
                                 .settings = {{kDevices, "2"}},
                                 .stop = [this] { return stop_.load(); }});
    EXPECT_TRUE(leader.ok()) << leader.status();
    leader_ = *std::move(leader);
  }

  // Rank 2 of three is not there.
  absl::Status Form() {
    auto own = MakeRankBackend({.rank = 0, .ranks = 3, .workspace_bytes = kWorkspace});
    EXPECT_TRUE(own.ok()) << own.status();
    return leader_->Form(*std::move(own)).status();
  }
  std::unique_ptr<ThreadWorker> Start(int rank, const std::string& devices = "2") {
    return std::make_unique<ThreadWorker>(
        *leader_, RankSpec{.rank = rank, .ranks = rank + 1, .workspace_bytes = kWorkspace}, kLimits,
        Settings{{kDevices, devices}});
  }

  static constexpr ChannelLimits kLimits = {.slice_bytes = 1 << 20};
  std::atomic<bool> stop_{false};
  std::unique_ptr<Leader> leader_;
};

TEST_F(FormingTest, ALeaderThatStopsWaitingEndsTheRanksThatAreThere) {
  const std::unique_ptr<ThreadWorker> there = Start(1);
  std::thread stop([this] {
    absl::SleepFor(absl::Milliseconds(50));
    stop_ = true;
  });
  EXPECT_TRUE(absl::IsCancelled(Form()));
  stop.join();
  leader_.reset();
  there->worker().Leave("the leader has gone");  // it may not have been there yet
  EXPECT_TRUE(there->AwaitEnd().ok());
}

TEST_F(FormingTest, ARankThatWaitsForTheLeaderLeaves) {
  const std::unique_ptr<ThreadWorker> within = Start(1), outside = Start(2);
  absl::SleepFor(absl::Milliseconds(20));
  within->worker().Leave("the test");
  outside->worker().Leave("the test");
  EXPECT_TRUE(within->AwaitEnd().ok());
  EXPECT_TRUE(outside->AwaitEnd().ok());
}

// Its rank is none of the leader's. It costs nobody anything.
TEST_F(FormingTest, AnotherNumberOfDevicesIsRefusedAndTheOthersWaitOn) {
  const std::unique_ptr<ThreadWorker> good = Start(1, "2"), bad = Start(3, "3");
  std::thread stop([&] {
    EXPECT_THAT(std::string(bad->AwaitEnd().message()),
                HasSubstr("process 1: number of devices must be what process 0 "
                          "has (its log says what that is), got 3"));
    stop_ = true;
  });
  EXPECT_TRUE(absl::IsCancelled(Form()));
  stop.join();
  leader_.reset();
  good->worker().Leave("the leader has gone");  // it may not have been there yet
  EXPECT_TRUE(good->AwaitEnd().ok());
}

}  // namespace
}  // namespace lossd::ranks::testing::ranks_threads_test
