// SPDX-License-Identifier: Apache-2.0
// Trainers that say everything twice, in any order and several at a time, that give up in the middle, or that
// are killed and start again from what they had written down.
#include <gmock/gmock.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/faults/faults_test.h"
#include "tests/support/server_process.h"
#include "tests/support/temp_folder.h"

namespace lossd::test::trainer_faults_test {
namespace {

using client::Client;
using ::testing::HasSubstr;

class TrainerFaultsTest : public FaultsTest {
 protected:
  std::vector<uint64_t> AnyOrder() {
    std::vector<uint64_t> ids(shape_.microbatches);
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), random_);
    return ids;
  }
  // Exactly one of three calls at a time applies the step; all get the same answer.
  void ApplyThreeTimes() {
    absl::StatusOr<v1::ApplyStepResponse> answers[3];
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&, i] { answers[i] = clients_[i]->ApplyStep(trainer_.StepRequest()); });
    }
    for (std::thread& thread : threads) thread.join();
    int repeated = 0;
    for (const auto& answer : answers) {
      ASSERT_TRUE(answer.ok()) << answer.status();
      EXPECT_EQ(answer->grad_norm(), answers[0]->grad_norm());
      repeated += answer->repeated_call() ? 1 : 0;
    }
    EXPECT_EQ(repeated, 2);
    Count("repeated steps", repeated);
  }
  Client& AnyClient() { return *clients_[static_cast<size_t>(Draw(2))]; }
  absl::Status Apply() { return AnyClient().ApplyStep(trainer_.StepRequest()).status(); }

  const std::unique_ptr<Client> clients_[3] = {Connect(), Connect(), Connect()};
};

TEST_F(TrainerFaultsTest, SeveralTrainersInAnyOrder) {
  proxy_.Delay(absl::Microseconds(500));
  for (int64_t i = 0; i < Scaled(10); ++i) {
    std::vector<std::pair<uint64_t, std::unique_ptr<SentMicrobatch>>> sent;
    for (const uint64_t id : AnyOrder()) {
      sent.emplace_back(id, trainer_.Send(AnyClient(), id, AnyTravel()));
      absl::SleepFor(absl::Microseconds(Draw(2000)));
      Count("microbatches in any order");
    }
    for (auto& [id, microbatch] : sent) {
      const absl::Status status = trainer_.Receive(id, *microbatch);
      ASSERT_TRUE(status.ok()) << status;
    }
    ASSERT_TRUE(Apply().ok());
    trainer_.Advance();
    ASSERT_TRUE(Undisturbed());
  }
}

TEST_F(TrainerFaultsTest, EverythingIsSaidTwice) {
  for (int64_t i = 0; i < Scaled(10); ++i) {
    std::vector<std::pair<uint64_t, std::unique_ptr<SentMicrobatch>>> sent;
    for (const uint64_t id : AnyOrder()) {
      for (int64_t copy = Draw(2); copy >= 0; --copy) {
        sent.emplace_back(id, trainer_.Send(AnyClient(), id, AnyTravel()));
        Count("microbatches at the same time as others or twice");
      }
    }
    for (auto& [id, microbatch] : sent) {
      const absl::Status status = trainer_.Receive(id, *microbatch);
      ASSERT_TRUE(status.ok()) << status;
    }
    const auto again = trainer_.Send(AnyClient(), AnyOrder()[0], AnyTravel());
    const auto result = again->Wait();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->accumulated_rows, 0);
    EXPECT_EQ(result->repeated_rows, result->valid_rows);
    ApplyThreeTimes();
    const auto late = trainer_.Send(AnyClient(), AnyOrder()[0], AnyTravel());
    EXPECT_THAT(std::string(late->Wait().status().message()),
                HasSubstr(absl::StrCat("is not the open step, which is ", trainer_.step() + 1)));
    Count("microbatches of a closed step");
    trainer_.Advance();
    ASSERT_TRUE(Undisturbed());
  }
}

// Given up at any time, they are sent again.
TEST_F(TrainerFaultsTest, MicrobatchesAreGivenUp) {
  for (int64_t i = 0; i < Scaled(15); ++i) {
    for (const uint64_t id : AnyOrder()) {
      const auto sent = trainer_.Send(AnyClient(), id, AnyTravel());
      absl::SleepFor(absl::Microseconds(Draw(3000)));
      sent->pending.Cancel();
      Count("microbatches given up", absl::IsCancelled(sent->Wait().status()) ? 1 : 0);
    }
    const absl::Status status = TrainStep(trainer_, AnyClient(), AnyTravel());
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_TRUE(Undisturbed());
  }
}

TEST_F(TrainerFaultsTest, AnotherMicrobatchUnderTheSameNameIsRefused) {
  for (int64_t i = 0; i < Scaled(5); ++i) {
    SmallTrainer other(RunShape{.seed = seed_ + 1});  // has other targets
    other.Decode(trainer_.Encode());
    for (uint64_t id = 0; id < shape_.microbatches; ++id) {
      const auto sent = trainer_.Send(AnyClient(), id, AnyTravel());
      ASSERT_TRUE(trainer_.Receive(id, *sent).ok());
    }
    const uint64_t id = AnyOrder()[0];
    const absl::Status refused = other.Send(AnyClient(), id, AnyTravel())->Wait().status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("opened before with another target"));
    Count("other microbatches under a taken name");
    const absl::Status status = TrainStep(trainer_, AnyClient(), AnyTravel());
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_TRUE(Undisturbed());
  }
}

// A trainer as a process of its own; see fault_process.cc.
class TrainerProcessTest : public FaultsTest {
 protected:
  // Runs the trainer up to `steps` steps: its exit status, or minus the signal that ended it.
  int Train(uint64_t steps) {
    process_ = std::make_unique<ChildProcess>(std::vector<std::string>{
        FAULT_PROCESS, "trainer", absl::StrCat("--server=", proxy_.target()), absl::StrCat("--seed=", seed_),
        absl::StrCat("--state=", state_file_), absl::StrCat("--steps=", steps)});
    return process_->WaitFor(absl::Seconds(30));
  }

  // Kills the trainer at the fault's place in the traffic of step number `step`, and lets it start again.
  void KillAndContinue(uint64_t step, Fault fault) {
    fault.action = Fault::Action::kNone;
    fault.call = [this] { process_->Signal(SIGKILL); };
    proxy_.Arm(fault);
    const int end = Train(step + 1);
    if (proxy_.fired()) {
      Count("kills of the trainer", end == -SIGKILL ? 1 : 0);
      ASSERT_THAT(end, testing::AnyOf(0, -SIGKILL));
      proxy_.Heal();
      ASSERT_EQ(Train(step + 1), 0);
    }
    std::string state = ReadWholeFile(state_file_);
    state.pop_back();  // nothing is to be applied any more
    trainer_.Decode(state);
    ASSERT_EQ(trainer_.step(), step + 1);
    ASSERT_TRUE(Undisturbed());
  }

  TempFolder folder_;
  const std::string state_file_ = folder_.File("trainer");
  std::unique_ptr<ChildProcess> process_;
};

TEST_F(TrainerProcessTest, DiesBetweenAnyTwoMessages) {
  uint64_t step = 0;
  for (int64_t round = 0; round < Scaled(1); ++round) {
    for (const Direction direction : {Direction::kToServer, Direction::kToClient}) {
      bool fired = true;
      for (int64_t message = 0; fired; ++message, ++step) {
        ASSERT_NO_FATAL_FAILURE(KillAndContinue(step, {.direction = direction, .after = message}))
            << "killed after message " << message;
        fired = proxy_.fired();
      }
    }
  }
}

TEST_F(TrainerProcessTest, DiesAtAnyByte) {
  const std::array<int64_t, 2> before = proxy_.bytes();
  ASSERT_EQ(Train(1), 0);
  const std::array<int64_t, 2> after = proxy_.bytes();  // a step and its process, as those that follow
  for (int64_t step = 1; step <= Scaled(10); ++step) {
    const Direction direction = Draw(1) == 0 ? Direction::kToServer : Direction::kToClient;
    const auto way = static_cast<size_t>(direction);
    const Fault fault{
        .direction = direction, .unit = Fault::Unit::kBytes, .after = Draw(after[way] - before[way])};
    ASSERT_NO_FATAL_FAILURE(KillAndContinue(static_cast<uint64_t>(step), fault)) << "after " << fault.after;
  }
}

}  // namespace
}  // namespace lossd::test::trainer_faults_test
