// SPDX-License-Identifier: Apache-2.0
// Gradients from outside in deterministic mode: they wait for their turn among the microbatches.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "server/engine/engine.h"
#include "tests/server/engine/contributions_fixture.h"
#include "tests/server/engine/row_collector.h"
#include "tests/server/engine/sent_slice.h"

namespace lossd::engine::deterministic_contributions_test {
namespace {

class DeterministicContributionsTest : public ContributionsTest {
 protected:
  DeterministicContributionsTest() { Start({.deterministic = true}); }

  // Notified when the contribution may be added.
  struct Turn {
    explicit Turn(Engine& engine, const Contribution& contribution)
        : ticket(engine.AwaitTurn(contribution, [called = called] { called->Notify(); })) {
      if (ticket == 0) called->Notify();
    }
    std::shared_ptr<absl::Notification> called = std::make_shared<absl::Notification>();
    uint64_t ticket;
  };
  // Sends a microbatch of two rows, {100 id + row, 0}, and waits for its end.
  void SendMicrobatch(uint64_t id) {
    StreamSpec spec = Stream(id);
    spec.hidden_dtype = kernels::DType::kFloat32;
    spec.microbatch_rows = 2;
    spec.rows = {0, 2};
    spec.targets = {1, 1};
    const auto collector = std::make_shared<RowCollector>();
    auto stream = engine_->Open(std::move(spec), collector);
    ASSERT_TRUE(stream.ok()) << stream.status();
    (*stream)->Start();
    SendSlice(**stream, {0, 2}, Values(id, {0, 2}));
    EXPECT_TRUE(collector->Wait().ok()) << collector->Wait();
  }
  void AddContribution(uint64_t id) {
    const auto contribution = engine_->OpenContribution(Spec(id));
    ASSERT_TRUE(contribution.ok()) << contribution.status();
    const Turn turn(*engine_, *contribution);
    turn.called->WaitForNotification();
    for (int64_t row = 0; row < kVocab; row += 5) {
      const auto added = Add(*contribution, {row, row + 5});
      EXPECT_TRUE(added.ok()) << added.status();
    }
  }
  // What the device saw of contributions: {100 id + row, 0} each, of microbatches: 100 id + row.
  std::vector<float> InOrder(uint64_t ids) {
    std::vector<float> order;
    for (uint64_t id = 0; id < ids; ++id) {
      if (id % 2 == 0) {
        order.insert(order.end(), {static_cast<float>(100 * id), static_cast<float>(100 * id + 1)});
      } else {
        const std::vector<float> values = Values(id, {0, kVocab});
        order.insert(order.end(), values.begin(), values.end());
      }
    }
    return order;
  }
};

TEST_F(DeterministicContributionsTest, AContributionWaitsForWhatIsBeforeIt) {
  const auto contribution = engine_->OpenContribution(Spec(1));
  ASSERT_TRUE(contribution.ok());
  const Turn turn(*engine_, *contribution);
  EXPECT_NE(turn.ticket, 0u);
  EXPECT_EQ(Add(*contribution, {0, 10}).status().code(), absl::StatusCode::kUnavailable) << "it did not wait";
  std::thread later([this] { SendMicrobatch(2); });
  EXPECT_FALSE(turn.called->WaitForNotificationWithTimeout(absl::Milliseconds(20)));
  SendMicrobatch(0);
  turn.called->WaitForNotification();
  EXPECT_FALSE(engine_->ForgetTurn(*contribution, turn.ticket)) << "called already";
  EXPECT_EQ(*Add(*contribution, {0, 4}), 4);
  EXPECT_EQ(*Add(*contribution, {4, 10}), 6);
  later.join();
  EXPECT_EQ(device_.accumulated(), InOrder(3));
  EXPECT_EQ(*Add(*contribution, {0, 10}), 0) << "repeats need no turn";
  EXPECT_EQ(engine_->Describe("head")->waits_for, "");
}

TEST_F(DeterministicContributionsTest, WaitsEndWithTheCallOrTheStep) {
  const auto contribution = engine_->OpenContribution(Spec(1));
  const Turn forgotten(*engine_, *contribution);
  EXPECT_TRUE(engine_->ForgetTurn(*contribution, forgotten.ticket));
  EXPECT_FALSE(engine_->ForgetTurn(*contribution, forgotten.ticket));
  const Turn waiting(*engine_, *contribution);
  ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  waiting.called->WaitForNotification();
  EXPECT_EQ(Add(*contribution, {0, 10}).status().code(), absl::StatusCode::kAborted);
  const auto again = engine_->OpenContribution(Spec(1));
  const Turn deleted(*engine_, *again);
  ASSERT_TRUE(engine_->DeleteHead("head").ok());
  deleted.called->WaitForNotification();
  EXPECT_EQ(Add(*again, {0, 10}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_FALSE(forgotten.called->HasBeenNotified());
}

TEST_F(DeterministicContributionsTest, NobodyWaitsOnAHeadThatIsGoneNorKeepsIt) {
  const auto contribution = engine_->OpenContribution(Spec(1));
  ASSERT_TRUE(contribution.ok());
  ASSERT_TRUE(engine_->DeleteHead("head").ok());
  EXPECT_EQ(Turn(*engine_, *contribution).ticket, 0u);
  EXPECT_EQ(device_.heads, 0) << "its memory is free";
}

TEST_F(DeterministicContributionsTest, AContributionOfNoRowsHasNoTurnToTake) {
  ContributionSpec nothing = Spec(0);
  nothing.contribution_rows = RowRange{3, 3};
  ASSERT_TRUE(engine_->OpenContribution(nothing).ok());
  AddContribution(1);
  EXPECT_EQ(Added().size(), 10u);
}

TEST_F(DeterministicContributionsTest, AnyOrderOfArrivalGivesTheSameSums) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 20; ++round) {
    std::vector<uint64_t> ids = {0, 1, 2, 3, 4};
    std::shuffle(ids.begin(), ids.end(), random);
    std::vector<std::thread> senders;
    for (uint64_t id : ids) {
      senders.emplace_back([this, id] {
        if (id % 2 == 0) {
          SendMicrobatch(id);
        } else {
          AddContribution(id);
        }
      });
      if (random() % 2 == 0) absl::SleepFor(absl::Milliseconds(1));
    }
    for (std::thread& sender : senders) sender.join();
    ASSERT_EQ(device_.accumulated(), InOrder(5));
    ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  }
}

}  // namespace
}  // namespace lossd::engine::deterministic_contributions_test
