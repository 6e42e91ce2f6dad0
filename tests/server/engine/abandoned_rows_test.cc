// SPDX-License-Identifier: Apache-2.0
// What callers leave behind that open rows and go: nothing.
#include <time.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/backend.h"
#include "kernels/errors/field_error.h"
#include "server/engine/engine.h"
#include "server/engine/errors.h"
#include "server/engine/ledger.h"
#include "tests/server/engine/contributions_fixture.h"
#include "tests/server/engine/engine_fixture.h"

namespace lossd::engine::abandoned_rows_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class AbandonedRowsTest : public EngineTest {
 protected:
  // Opens a stream and gives up after `sent` rows.
  absl::Status Abandon(StreamSpec spec, int64_t sent = 0) {
    const uint64_t id = spec.microbatch_id;
    const int64_t begin = spec.rows.begin;
    auto collector = std::make_shared<RowCollector>();
    auto stream = engine_->Open(std::move(spec), collector);
    if (!stream.ok()) return stream.status();
    (*stream)->Start();
    if (sent > 0) {
      Send(**stream, id, {begin, begin + sent});
      while (engine_->Describe("head")->step_rows < sent) absl::SleepFor(absl::Milliseconds(1));
    }
    (*stream)->Cancel(absl::CancelledError("gone"));
    collector->Wait();
    return absl::OkStatus();
  }
};

TEST_F(AbandonedRowsTest, DoNotFillTheLedger) {
  Start({.max_ledger_rows = 16});
  for (uint64_t id = 0; id < 100; ++id) ASSERT_TRUE(Abandon(Whole(id, 16)).ok()) << id;
  EXPECT_EQ(engine_->stats().ledger_rows, 0);
  EXPECT_EQ(engine_->stats().ledger_bytes, 0);
  EXPECT_EQ(engine_->Describe("head")->step_microbatches, 0);
}

TEST_F(AbandonedRowsTest, DoNotFillTheLedgerIfNoneHasATarget) {
  Start({.max_ledger_rows = 16});
  for (uint64_t id = 0; id < 20; ++id) {
    StreamSpec spec = Whole(id, 16);
    spec.targets.assign(16, spec.ignore_index);
    ASSERT_TRUE(Abandon(std::move(spec)).ok()) << id;
  }
  EXPECT_EQ(engine_->stats().ledger_rows, 0);
}

TEST_F(AbandonedRowsTest, MayBeOpenedAgainAsAnotherMicrobatch) {
  Start();
  ASSERT_TRUE(Abandon(Whole(7, 16)).ok());
  StreamSpec other = Whole(7, 5);
  other.targets.assign(5, 3);
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(other, collector);
  ASSERT_NE(stream, nullptr);
  Send(*stream, 7, {0, 5});
  ASSERT_TRUE(collector->Wait().ok()) << collector->Wait();
  EXPECT_EQ(collector->summary().accumulated_rows, 5);
}

TEST_F(AbandonedRowsTest, WhatWasAccumulatedStays) {
  Start();
  ASSERT_TRUE(Abandon(Whole(1, 16), 8).ok());
  EXPECT_EQ(engine_->stats().ledger_rows, 8);
  StreamSpec other = Whole(1, 16);
  other.targets.assign(16, 2);
  EXPECT_EQ(engine_->Open(other, std::make_shared<RowCollector>()).status().code(),
            absl::StatusCode::kFailedPrecondition);
  auto collector = std::make_shared<RowCollector>();
  auto again = Open(Whole(1, 16), collector);
  ASSERT_NE(again, nullptr);
  Send(*again, 1, {0, 16});
  ASSERT_TRUE(collector->Wait().ok());
  EXPECT_EQ(collector->summary().repeated_rows, 8);
  EXPECT_EQ(collector->summary().accumulated_rows, 8);
}

TEST_F(AbandonedRowsTest, RowsThatAnOpenStreamHasTooStay) {
  Start();
  auto collector = std::make_shared<RowCollector>();
  auto open = Open(Spec(1, 16, {4, 12}), collector);
  ASSERT_NE(open, nullptr);
  ASSERT_TRUE(Abandon(Whole(1, 16)).ok());
  EXPECT_EQ(engine_->stats().ledger_rows, 8);
  Send(*open, 1, {4, 12});
  ASSERT_TRUE(collector->Wait().ok());
  EXPECT_EQ(collector->summary().accumulated_rows, 8);
}

TEST_F(AbandonedRowsTest, OfAnEarlierStepLeaveTheOpenOneAlone) {
  Start();
  auto old_collector = std::make_shared<RowCollector>();
  // Not started: its end comes late.
  auto old_stream = engine_->Open(Whole(1, 8), old_collector);
  ASSERT_TRUE(old_stream.ok());
  ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(Whole(1, 8), collector);
  ASSERT_NE(stream, nullptr);
  (*old_stream)->Start();
  EXPECT_FALSE(old_collector->Wait().ok());
  EXPECT_EQ(engine_->stats().ledger_rows, 8);
  Send(*stream, 1, {0, 8});
  ASSERT_TRUE(collector->Wait().ok());
}

TEST_F(AbandonedRowsTest, RowsOfOpenCallsAreWithinTheLedgersMemory) {
  Start({.ledger_bytes = 4096, .peer_share = 1.0});
  std::vector<std::unique_ptr<Stream>> streams;
  absl::Status refused;
  for (uint64_t id = 0; id < 100 && refused.ok(); ++id) {
    StreamSpec spec = Whole(id, 64);
    spec.accumulate_gradients = false;
    auto stream = engine_->Open(std::move(spec), std::make_shared<RowCollector>());
    refused = stream.status();
    if (stream.ok()) streams.push_back(*std::move(stream));
  }
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("--ledger_bytes"));
  EXPECT_GT(streams.size(), 2u);
  EXPECT_LE(engine_->stats().row_bytes_used, 4096);
  streams.clear();
  EXPECT_EQ(engine_->stats().row_bytes_used, 0);
}

TEST_F(AbandonedRowsTest, APeerLeavesMemoryForRowsOfOthers) {
  Start({.ledger_bytes = 1 << 16, .peer_share = 0.5});
  std::vector<std::unique_ptr<Stream>> streams;
  const auto open = [&](const std::string& peer, uint64_t id) {
    StreamSpec spec = Whole(id, 64);
    spec.accumulate_gradients = false;
    spec.peer = peer;
    auto stream = engine_->Open(std::move(spec), std::make_shared<RowCollector>());
    if (stream.ok()) streams.push_back(*std::move(stream));
    return stream.status();
  };
  absl::Status refused;
  for (uint64_t id = 0; id < 1000 && refused.ok(); ++id) refused = open("greedy", id);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("--peer_share"));
  EXPECT_TRUE(open("other", 0).ok());
}

TEST_F(AbandonedRowsTest, ALedgerOfManySmallMicrobatchesIsWithinItsMemory) {
  Start({.max_streams = 4, .ledger_bytes = 1 << 16, .peer_share = 1.0});
  absl::Status refused;
  for (uint64_t id = 0; id < 10'000 && refused.ok(); ++id) {
    auto collector = std::make_shared<RowCollector>();
    auto stream = engine_->Open(Whole(id, 1), collector);
    refused = stream.status();
    if (!refused.ok()) break;
    (*stream)->Start();
    Send(**stream, id, {0, 1});
    collector->Wait();
  }
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("--ledger_bytes"));
  ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  EXPECT_EQ(engine_->stats().row_bytes_used, 0);
}

TEST_F(AbandonedRowsTest, ADeletedHeadGivesItsMemoryBack) {
  Start({.ledger_bytes = 1 << 16});
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(Whole(0, 8), collector);
  Send(*stream, 0, {0, 8});
  ASSERT_TRUE(collector->Wait().ok());
  EXPECT_GT(engine_->stats().row_bytes_used, 0);
  ASSERT_TRUE(engine_->DeleteHead("head").ok());
  EXPECT_EQ(engine_->stats().row_bytes_used, 0);
}

// ---- Lists of ids ----

TEST_F(AbandonedRowsTest, ListsOfMicrobatchesAreBounded) {
  Start({.max_step_microbatches = 100});
  StepRequest request;
  request.expected_microbatches.resize(201);
  const absl::Status refused = engine_->ApplyStep("head", request).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  const auto violation = errors::GetFieldViolation(refused);
  ASSERT_TRUE(violation.has_value());
  EXPECT_EQ(violation->field, "expected_microbatches.size");
  EXPECT_EQ(violation->value, "201");
}

TEST_F(AbandonedRowsTest, AnIdMayBeNamedTwice) {
  Start();
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(Whole(5, 1), collector);
  Send(*stream, 5, {0, 1});
  ASSERT_TRUE(collector->Wait().ok());
  StepRequest request;
  request.expected_microbatches = {5, 5};
  EXPECT_TRUE(engine_->ApplyStep("head", request).ok());
}

// ---- Contributions ----

TEST_F(ContributionsTest, OpeningOneBooksNothing) {
  for (uint64_t id = 0; id < 50; ++id) ASSERT_TRUE(engine_->OpenContribution(Spec(id)).ok()) << id;
  EXPECT_EQ(engine_->stats().ledger_rows, 0);
  EXPECT_EQ(engine_->Describe("head")->step_contributions, 0);
  EXPECT_TRUE(engine_->Open(Stream(3), std::make_shared<RowCollector>()).ok());
}

TEST_F(ContributionsTest, AMicrobatchThatTookTheIdMeanwhileKeepsIt) {
  const absl::StatusOr<Contribution> contribution = engine_->OpenContribution(Spec(3));
  ASSERT_TRUE(contribution.ok());
  const auto stream = engine_->Open(Stream(3), std::make_shared<RowCollector>());
  ASSERT_TRUE(stream.ok());
  const absl::Status refused = Add(*contribution, {0, 1}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("names a microbatch of this step"));
  EXPECT_THAT(Added(), IsEmpty());
}

TEST_F(ContributionsTest, TermsThatDifferAreRefusedWithTheData) {
  ContributionSpec other = Spec(3);
  other.scale = 2.0f;
  const auto first = engine_->OpenContribution(Spec(3));
  const auto second = engine_->OpenContribution(other);
  ASSERT_TRUE(first.ok() && second.ok());
  ASSERT_TRUE(Add(*first, {0, 1}).ok());
  EXPECT_EQ(Add(*second, {1, 2}).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Added(), ElementsAre(300.0f));
}

// ---- The cost of opening ----

double ThreadSeconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

double SecondsToDeclare(int64_t rows) {
  Ledger ledger(rows, 1);
  const std::vector<int32_t> target = {1};
  const double start = ThreadSeconds();
  for (int64_t row = 0; row < rows; ++row) {
    EXPECT_TRUE(ledger.Declare(1, {.microbatch_rows = rows}, {row, row + 1}, {target}).ok());
  }
  return ThreadSeconds() - start;
}

// Single rows, each a declaration of its own: eight times as many take about eight times the time, not 64.
TEST(LedgerCostTest, DoesNotGrowWithTheRowsThatAreThere) {
  SecondsToDeclare(1000);  // warm
  const double few = SecondsToDeclare(5'000);
  const double many = SecondsToDeclare(40'000);
  EXPECT_LT(many / few, 30.0) << few << " s, " << many << " s";
}

}  // namespace
}  // namespace lossd::engine::abandoned_rows_test
