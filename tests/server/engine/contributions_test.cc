// SPDX-License-Identifier: Apache-2.0
// Tests of gradients that come from outside (AddGradient) through the engine, in both modes.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/engine/engine.h"
#include "server/engine/errors.h"
#include "tests/server/engine/contributions_fixture.h"
#include "tests/server/engine/row_collector.h"
#include "tests/server/engine/sent_slice.h"

// ---- In arrival order ----

namespace lossd::engine::contributions_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr float kInf = std::numeric_limits<float>::infinity();

TEST_F(ContributionsTest, RowsAreAddedOnceWhateverTheSlices) {
  const auto first = engine_->OpenContribution(Spec(1));
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->rows, RowRange({0, kVocab}));
  EXPECT_EQ(first->cols, kHidden);
  EXPECT_EQ(*Add(*first, {0, 4}), 4);
  const auto again = engine_->OpenContribution(Spec(1));  // after a broken call
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(*Add(*again, {0, 3}), 0);
  EXPECT_EQ(*Add(*again, {3, 7}), 3);
  EXPECT_EQ(*Add(*again, {7, 10}), 3);
  EXPECT_EQ(*Add(*first, {4, 8}), 0) << "the call that seemed dead";
  EXPECT_THAT(Added(), ElementsAre(100, 101, 102, 103, 104, 105, 106, 107, 108, 109));
  EXPECT_EQ(engine_->Describe("head")->step_contributions, 1);
  EXPECT_EQ(engine_->Describe("head")->step_microbatches, 0);
}

TEST_F(ContributionsTest, ScaleMultipliesAndRangesAreKept) {
  ContributionSpec spec = Spec(1);
  spec.scale = -0.5f;
  spec.contribution_rows = RowRange{4, 8};
  spec.rows = RowRange{5, 7};
  const auto part = engine_->OpenContribution(spec);
  ASSERT_TRUE(part.ok()) << part.status();
  EXPECT_EQ(*Add(*part, {5, 7}), 2);
  EXPECT_THAT(Added(), ElementsAre(-52.5f, -53.0f));
  EXPECT_EQ(Add(*part, {4, 6}).status().code(), absl::StatusCode::kInvalidArgument) << "another call's row";
  const auto applied = Apply({.step = 0, .expected_microbatches = {1}});
  EXPECT_FALSE(applied.ok());
  EXPECT_THAT(GetMissing(applied.status()), ElementsAre("contribution 1: rows [4, 5), [7, 8) of [4, 8)"));
}

TEST_F(ContributionsTest, AStepExpectsContributionsAsMicrobatches) {
  const auto contribution = engine_->OpenContribution(Spec(3));
  ASSERT_TRUE(contribution.ok());
  ASSERT_TRUE(Add(*contribution, {0, 6}).ok());
  const absl::Status incomplete = Apply({.step = 0, .expected_microbatches = {3, 4}}).status();
  EXPECT_EQ(incomplete.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(GetMissing(incomplete),
              ElementsAre("contribution 3: rows [6, 10) of [0, 10)", "microbatch 4: never opened"));
  ASSERT_TRUE(Add(*contribution, {6, 10}).ok());
  const auto applied = Apply({.step = 0, .expected_microbatches = {3}, .expected_rows = 0});
  ASSERT_TRUE(applied.ok()) << applied.status();
  EXPECT_EQ(applied->contributions, 1);
  EXPECT_EQ(applied->microbatches, 0);
  EXPECT_EQ(Add(*contribution, {0, 1}).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(engine_->Describe("head")->step_contributions, 0);
}

TEST_F(ContributionsTest, RefusedContributionsAreNotCounted) {
  const auto refused = engine_->OpenContribution(Spec(3));
  ASSERT_TRUE(refused.ok());
  const std::vector<float> bad(2, kInf);
  EXPECT_EQ(engine_->AddRows(*refused, {0, 1}, Bytes(bad)).status().code(), absl::StatusCode::kOutOfRange);
  ASSERT_TRUE(Add(*engine_->OpenContribution(Spec(4)), {0, 10}).ok());
  EXPECT_EQ(engine_->Describe("head")->step_contributions, 1);
  const auto applied = Apply({.step = 0});
  ASSERT_TRUE(applied.ok()) << applied.status();
  EXPECT_EQ(applied->contributions, 1);
  const absl::Status refused_step = Apply({.step = 0, .expected_microbatches = {3, 4}}).status();
  EXPECT_THAT(GetMissing(refused_step), ElementsAre("microbatch 3: was not whole in it"));
}

TEST_F(ContributionsTest, OtherContentsUnderTheSameIdAreRefused) {
  const auto contribution = engine_->OpenContribution(Spec(1));
  ASSERT_TRUE(Add(*contribution, {0, 5}).ok());
  ContributionSpec other = Spec(1);
  other.scale = 2.0f;
  EXPECT_EQ(engine_->OpenContribution(other).status().code(), absl::StatusCode::kFailedPrecondition);
  std::vector<float> values = Values(1, {3, 8});
  values[1 * kHidden + 1] = 0.25f;  // row 4
  const absl::Status changed = engine_->AddRows(*contribution, {3, 8}, Bytes(values)).status();
  EXPECT_EQ(changed.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(changed.message()), HasSubstr("payload row 4"));
  EXPECT_EQ(Added().size(), 5u) << "not even the new rows of the slice";
}

TEST_F(ContributionsTest, AnIdNamesEitherAMicrobatchOrAContribution) {
  ASSERT_TRUE(Add(*engine_->OpenContribution(Spec(1)), {0, 1}).ok());
  const absl::Status taken = engine_->Open(Stream(1), std::make_shared<RowCollector>()).status();
  EXPECT_EQ(taken.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(taken.message()), HasSubstr("names a contribution of this step"));
  auto stream = engine_->Open(Stream(2), std::make_shared<RowCollector>());
  ASSERT_TRUE(stream.ok()) << stream.status();
  const absl::Status used = engine_->OpenContribution(Spec(2)).status();
  EXPECT_EQ(used.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(used.message()), HasSubstr("names a microbatch of this step"));
  StreamSpec loss_only = Stream(1);
  loss_only.accumulate_gradients = false;
  EXPECT_TRUE(engine_->Open(loss_only, std::make_shared<RowCollector>()).ok()) << "its id means nothing";
}

TEST_F(ContributionsTest, BadSpecsAndValuesChangeNothing) {
  const auto refused = [&](ContributionSpec spec) { return engine_->OpenContribution(spec).status(); };
  ContributionSpec spec = Spec(1);
  spec.head = "missing";
  EXPECT_EQ(refused(spec).code(), absl::StatusCode::kNotFound);
  spec = Spec(1, 5);
  const absl::Status future = refused(spec);
  EXPECT_EQ(future.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(GetCurrentStep(future), 0u);
  spec = Spec(1);
  spec.param = kernels::Param::kBias;
  EXPECT_EQ(refused(spec).code(), absl::StatusCode::kFailedPrecondition);
  spec.param = kernels::Param::kClassWeights;
  EXPECT_EQ(refused(spec).code(), absl::StatusCode::kFailedPrecondition);
  spec = Spec(1);
  spec.scale = kInf;
  EXPECT_EQ(refused(spec).code(), absl::StatusCode::kInvalidArgument);
  spec = Spec(1);
  spec.contribution_rows = RowRange{0, 11};
  EXPECT_EQ(refused(spec).code(), absl::StatusCode::kInvalidArgument);
  spec.contribution_rows = RowRange{2, 8};
  spec.rows = RowRange{1, 4};
  EXPECT_EQ(refused(spec).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(engine_->Describe("head")->step_contributions, 0);

  const auto contribution = engine_->OpenContribution(Spec(1));
  std::vector<float> values = Values(1, {2, 6});
  EXPECT_EQ(engine_->AddRows(*contribution, {2, 5}, Bytes(values)).status().code(),
            absl::StatusCode::kInvalidArgument);
  values[3 * kHidden + 1] = -kInf;
  const absl::Status infinite = engine_->AddRows(*contribution, {2, 6}, Bytes(values)).status();
  EXPECT_EQ(infinite.code(), absl::StatusCode::kOutOfRange);
  EXPECT_THAT(std::string(infinite.message()), HasSubstr("payload row 5 column 1 must be finite"));
  EXPECT_THAT(Added(), IsEmpty());
  ASSERT_TRUE(Add(*engine_->OpenContribution(Spec(2)), {0, 1}).ok());
  ASSERT_TRUE(Add(*engine_->OpenContribution(Spec(4)), {0, 1}).ok());
  EXPECT_EQ(refused(Spec(3)).code(), absl::StatusCode::kResourceExhausted) << "25 rows are remembered";
}

// A finite element that a finite scale makes infinite in fp32 is refused; the largest that fits is added.
TEST_F(ContributionsTest, ProductsThatOverflow) {
  const struct {
    kernels::DType dtype;
    uint32_t fits;  // the largest element that fits, times the scale
    float scale;
  } cases[] = {{kernels::DType::kFloat32, 0x7effffffu, 2.0f},
               {kernels::DType::kFloat32, 0x7effffffu, -2.0f},
               {kernels::DType::kFloat32, 0x3f800000u, 3.4028235e38f},
               {kernels::DType::kFloat32, 0x7f7fffffu, 1.0f},
               {kernels::DType::kFloat32, 0x7f7fffffu, 0.0f},
               {kernels::DType::kBFloat16, 0x7effu, 2.0f},
               {kernels::DType::kFloat16, 0x3c00u, 3.4028235e38f},
               {kernels::DType::kFloat16, 0x7bffu, 5.1936e33f},
               {kernels::DType::kFloat16, 0x7bffu, 1e30f}};
  for (const auto& [dtype, fits, scale] : cases) {
    const size_t size = kernels::SizeOf(dtype);
    Contribution contribution{.terms = {.rows = {0, kVocab}, .dtype = dtype, .scale = scale},
                              .cols = kHidden};
    for (const uint32_t bits :
         {fits, fits + 1, fits | 1u << (8 * size - 1), (fits + 1) | 1u << (8 * size - 1)}) {
      std::vector<uint8_t> bytes(kVocab * kHidden * size);
      std::memcpy(&bytes[7 * size], &bits, size);
      const absl::Status status = CheckFinite(contribution, {0, kVocab}, bytes);
      const uint32_t magnitude = bits & (size == 2 ? 0x7fffu : 0x7fffffffu);
      EXPECT_EQ(status.ok(), magnitude == fits) << bits << " times " << scale;
      if (status.ok()) continue;
      EXPECT_THAT(std::string(status.message()), HasSubstr("open.scale"));
    }
  }
}

TEST_F(ContributionsTest, NonFiniteElementsOfEveryTypeAreFound) {
  const uint16_t halves[] = {0x7c00, 0xfc00, 0x7e01, 0x7bff};
  const uint16_t bfloats[] = {0x7f80, 0xff80, 0x7fc1, 0x7f7f};
  for (const kernels::DType dtype : {kernels::DType::kFloat16, kernels::DType::kBFloat16}) {
    ContributionSpec spec = Spec(dtype == kernels::DType::kFloat16 ? 1 : 2);
    spec.dtype = dtype;
    const auto contribution = engine_->OpenContribution(spec);
    ASSERT_TRUE(contribution.ok());
    for (int i = 0; i < 4; ++i) {
      std::vector<uint8_t> bytes(kVocab * kHidden * 2);
      std::memcpy(&bytes[14], dtype == kernels::DType::kFloat16 ? &halves[i] : &bfloats[i], 2);
      const absl::Status status = CheckFinite(*contribution, {0, kVocab}, bytes);
      EXPECT_EQ(status.ok(), i == 3) << "the largest finite number is one";
      if (i == 3) continue;
      EXPECT_THAT(std::string(status.message()), HasSubstr("row 3 column 1"));
    }
  }
}

TEST_F(ContributionsTest, ZeroedGradientsEndOpenCalls) {
  const auto contribution = engine_->OpenContribution(Spec(1));
  ASSERT_TRUE(Add(*contribution, {0, 5}).ok());
  ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  EXPECT_EQ(Add(*contribution, {5, 10}).status().code(), absl::StatusCode::kAborted);
  const auto next = engine_->OpenContribution(Spec(1));
  ASSERT_TRUE(next.ok());
  EXPECT_EQ(Add(*contribution, {5, 10}).status().code(), absl::StatusCode::kAborted)
      << "though the id is back";
  EXPECT_EQ(*Add(*next, {0, 10}), 10);
  ASSERT_TRUE(engine_->DeleteHead("head").ok());
  EXPECT_EQ(Add(*next, {0, 10}).status().code(), absl::StatusCode::kNotFound);
  AddHead();
  EXPECT_EQ(Add(*next, {0, 10}).status().code(), absl::StatusCode::kNotFound) << "another head of that name";
}

TEST_F(ContributionsTest, AFailingDeviceIsNotTrusted) {
  const auto contribution = engine_->OpenContribution(Spec(1));
  device_.fail_add = [] { return absl::UnavailableError("gone"); };
  EXPECT_EQ(Add(*contribution, {0, 5}).status().code(), absl::StatusCode::kInternal);
  device_.fail_add = [] { return absl::OkStatus(); };
  EXPECT_EQ(Add(*contribution, {0, 5}).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(Apply({.step = 0}).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(engine_->OpenContribution(Spec(2)).status().code(), absl::StatusCode::kInternal);
  ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  EXPECT_TRUE(engine_->OpenContribution(Spec(1)).ok());
}

// Calls that break anywhere and are sent again: whatever happens, each row arrives once.
TEST_F(ContributionsTest, RandomHistoriesAddEachRowOnce) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (uint64_t step = 0; step < 50; ++step) {
    std::vector<float> expected;
    for (uint64_t id : {1, 2}) {
      for (bool done = false; !done;) {
        const auto call = engine_->OpenContribution(Spec(id, step));
        ASSERT_TRUE(call.ok()) << call.status();
        int64_t row = 0;
        while (row < kVocab && random() % 4 != 0) {  // else the call breaks here
          const int64_t end = row + 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(kVocab - row));
          ASSERT_TRUE(Add(*call, {row, end}).ok());
          row = end;
        }
        done = row == kVocab;
      }
      for (int64_t row = 0; row < kVocab; ++row) expected.push_back(Values(id, {row, row + 1})[0]);
    }
    ASSERT_THAT(Added(), ::testing::UnorderedElementsAreArray(expected));
    ASSERT_TRUE(Apply({.step = step, .expected_microbatches = {1, 2}}).ok());
  }
}

}  // namespace
}  // namespace lossd::engine::contributions_test

// ---- In deterministic order ----
// Gradients from outside in deterministic mode: they wait for their turn among the microbatches.

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
  EXPECT_FALSE(ForgetTurn(*contribution, turn.ticket)) << "called already";
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
  EXPECT_TRUE(ForgetTurn(*contribution, forgotten.ticket));
  EXPECT_FALSE(ForgetTurn(*contribution, forgotten.ticket));
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
