// SPDX-License-Identifier: Apache-2.0
#include "server/engine/ledger.h"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/backend.h"
#include "kernels/errors/field_error.h"
#include "server/engine/errors.h"

namespace lossd::engine::ledger_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int32_t kIgnored = kernels::kIgnoredTarget;

MicrobatchTerms Terms(int64_t rows) { return {.microbatch_rows = rows}; }

std::vector<int32_t> Targets(size_t rows, int32_t value = 1) { return std::vector<int32_t>(rows, value); }

TEST(LedgerTest, SettlesRowsOnce) {
  Ledger ledger(100, 10);
  ASSERT_TRUE(ledger.Declare(7, Terms(4), {0, 4}, {Targets(4)}).ok());
  std::vector<uint8_t> mask(4);
  EXPECT_EQ(ledger.Reserve(7, {0, 4}, absl::MakeSpan(mask)), 0);
  EXPECT_THAT(mask, ElementsAre(1, 1, 1, 1));
  EXPECT_TRUE(ledger.AnyReserved(7, {3, 4}));
  EXPECT_EQ(ledger.Commit(7, {0, 4}), 4);
  EXPECT_FALSE(ledger.AnyReserved(7, {0, 4}));
  EXPECT_EQ(ledger.Reserve(7, {0, 4}, absl::MakeSpan(mask)), 4);
  EXPECT_THAT(mask, ElementsAre(0, 0, 0, 0));
  EXPECT_EQ(ledger.Commit(7, {0, 4}), 0);
  EXPECT_EQ(ledger.accumulated_rows(), 4);
  EXPECT_THAT(ledger.Missing({7}), IsEmpty());
}

TEST(LedgerTest, ReleasedRowsArePendingAgain) {
  Ledger ledger(100, 10);
  ASSERT_TRUE(ledger.Declare(1, Terms(3), {0, 3}, {Targets(3)}).ok());
  std::vector<uint8_t> mask(3);
  ledger.Reserve(1, {0, 3}, absl::MakeSpan(mask));
  ledger.Release(1, {0, 3});
  EXPECT_THAT(ledger.Missing({1}), ElementsAre("microbatch 1: rows [0, 3) of 3"));
  EXPECT_EQ(ledger.Reserve(1, {0, 3}, absl::MakeSpan(mask)), 0);
  EXPECT_THAT(mask, ElementsAre(1, 1, 1));
}

TEST(LedgerTest, IgnoredRowsSettleWithoutWork) {
  Ledger ledger(100, 10);
  ASSERT_TRUE(ledger.Declare(1, Terms(3), {0, 3}, {std::vector<int32_t>{kIgnored, 5, kIgnored}}).ok());
  std::vector<uint8_t> mask(3);
  EXPECT_EQ(ledger.Reserve(1, {0, 3}, absl::MakeSpan(mask)), 0);
  EXPECT_THAT(mask, ElementsAre(0, 1, 0));
  EXPECT_EQ(ledger.Commit(1, {0, 3}), 1);
  EXPECT_THAT(ledger.Missing({1}), IsEmpty());
  ASSERT_TRUE(ledger.Declare(2, Terms(2), {0, 2}, {Targets(2, kIgnored)}).ok());
  EXPECT_THAT(ledger.Missing({2}), IsEmpty());
  EXPECT_EQ(ledger.accumulated_rows(), 1);
}

TEST(LedgerTest, RefusesOtherContentsUnderTheSameId) {
  Ledger ledger(100, 10);
  ASSERT_TRUE(ledger.Declare(1, Terms(8), {0, 4}, {Targets(4)}).ok());
  EXPECT_TRUE(ledger.Declare(1, Terms(8), {2, 6}, {Targets(4)}).ok());
  const absl::Status other_target = ledger.Declare(1, Terms(8), {5, 8}, {std::vector<int32_t>{2, 1, 1}});
  EXPECT_EQ(other_target.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(other_target.message()), HasSubstr("row 5"));
  const std::vector<float> weights = {1.0f, 2.0f};
  EXPECT_EQ(ledger.Declare(1, Terms(8), {0, 2}, {Targets(2), weights}).code(),
            absl::StatusCode::kFailedPrecondition);
  MicrobatchTerms other_terms = Terms(8);
  other_terms.grad_output = 2.0f;
  EXPECT_EQ(ledger.Declare(1, other_terms, {6, 8}, {Targets(2)}).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ledger.declared_rows(), 6);  // the refused ones left nothing behind
  EXPECT_THAT(ledger.Missing({1}), ElementsAre("microbatch 1: rows [0, 8) of 8"));
}

TEST(LedgerTest, TellsWhatIsUnsettled) {
  Ledger ledger(100, 10);
  EXPECT_EQ(ledger.MicrobatchRows(1), std::nullopt);
  EXPECT_EQ(ledger.CountUnsettled(1, {3, 7}), 4);
  ASSERT_TRUE(ledger.Declare(1, Terms(8), {2, 6}, {std::vector<int32_t>{7, kIgnored, 5, 6}}).ok());
  EXPECT_EQ(ledger.MicrobatchRows(1), 8);
  std::vector<uint8_t> mask(6);
  ledger.MarkUnsettled(1, {1, 7}, absl::MakeSpan(mask));
  EXPECT_THAT(mask, ElementsAre(1, 1, 0, 1, 1, 1));
  EXPECT_EQ(ledger.CountUnsettled(1, {1, 7}), 5);
}

TEST(LedgerTest, TellsWhatRowsWereDeclaredWith) {
  Ledger ledger(100, 10);
  const std::vector<float> lse = {0.5f, -2.0f};
  ASSERT_TRUE(ledger.Declare(1, Terms(8), {2, 4}, {Targets(2, 7)}).ok());
  ASSERT_TRUE(ledger.Declare(1, Terms(8), {4, 6}, {.targets = Targets(2, 9), .grad_lse = lse}).ok());
  const RowValues values = ledger.Contents(1, {3, 7});
  EXPECT_THAT(values.targets, ElementsAre(7, 9, 9, kIgnored));
  EXPECT_THAT(values.grad_lse, ElementsAre(0.0f, 0.5f, -2.0f, 0.0f));
  EXPECT_THAT(values.row_weights, IsEmpty());
  EXPECT_THAT(values.grad_loss, IsEmpty());
  EXPECT_GE(ledger.bytes(), 4 * 5 + 2 * 4);
  EXPECT_LE(ledger.bytes(), 4 * 5 + 2 * 4 + 3 * 300) << "a microbatch and two runs of rows";
}

TEST(LedgerTest, RefusesOtherGradientsUnderTheSameId) {
  using Floats = absl::Span<const float> RowContents::*;
  for (const auto& [floats, if_absent] : {std::pair<Floats, float>(&RowContents::row_weights, 1.0f),
                                          {&RowContents::grad_loss, 1.0f},
                                          {&RowContents::grad_lse, 0.0f},
                                          {&RowContents::grad_entropy, 0.0f}}) {
    Ledger ledger(100, 10);
    const std::vector<int32_t> targets = Targets(3);
    const std::vector<float> values = {if_absent, 0.25f, if_absent};
    RowContents contents{targets};
    contents.*floats = values;
    ASSERT_TRUE(ledger.Declare(1, Terms(3), {0, 3}, contents).ok());
    EXPECT_TRUE(ledger.Declare(1, Terms(3), {0, 3}, contents).ok());
    std::vector<float> other = values;
    other[2] += 1.0f;
    contents.*floats = other;
    const absl::Status refused = ledger.Declare(1, Terms(3), {0, 3}, contents);
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(refused.message()), HasSubstr("row 2"));
    EXPECT_TRUE(ledger.Declare(1, Terms(3), {0, 1}, {Targets(1)}).ok()) << "absent is " << if_absent;
    EXPECT_FALSE(ledger.Declare(1, Terms(3), {1, 2}, {Targets(1)}).ok());
  }
}

TEST(LedgerTest, BoundsItsRows) {
  Ledger ledger(10, 10);
  ASSERT_TRUE(ledger.Declare(1, Terms(8), {0, 8}, {Targets(8)}).ok());
  const absl::Status status = ledger.Declare(2, Terms(3), {0, 3}, {Targets(3)});
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ledger.microbatches(), 1);
  EXPECT_TRUE(ledger.Declare(1, Terms(8), {0, 8}, {Targets(8)}).ok());  // a repeat needs no room
  EXPECT_TRUE(ledger.Declare(2, Terms(2), {0, 2}, {Targets(2)}).ok());
  ledger.Clear();
  EXPECT_EQ(ledger.bytes(), 0);
  EXPECT_TRUE(ledger.Declare(3, Terms(10), {0, 10}, {Targets(10)}).ok());
}

TEST(LedgerTest, BoundsItsMicrobatches) {
  Ledger ledger(10, 2);
  ASSERT_TRUE(ledger.Declare(1, Terms(0), {0, 0}, {}).ok());
  ASSERT_TRUE(ledger.Declare(2, Terms(0), {0, 0}, {}).ok());
  const absl::Status refused = ledger.Declare(37, Terms(0), {0, 0}, {});
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  const auto refused_field = errors::GetFieldViolation(refused).value_or(errors::FieldViolation());
  EXPECT_EQ(refused_field.field, "open.microbatch_id");
  EXPECT_EQ(refused_field.value, "37");
  EXPECT_EQ(ledger.microbatches(), 2);
  EXPECT_TRUE(ledger.Declare(2, Terms(0), {0, 0}, {}).ok());  // a repeat needs no room
  ledger.Clear();
  EXPECT_TRUE(ledger.Declare(37, Terms(0), {0, 0}, {}).ok());
}

TEST(LedgerTest, CountsWhatIsPartOfTheSum) {
  Ledger ledger(100, 10);
  ASSERT_TRUE(ledger.Declare(1, Terms(0), {0, 0}, {}).ok());                      // nothing to accumulate
  ASSERT_TRUE(ledger.Declare(2, Terms(2), {0, 2}, {Targets(2, kIgnored)}).ok());  // likewise
  for (uint64_t id : {3, 4, 5}) ASSERT_TRUE(ledger.Declare(id, Terms(2), {0, 2}, {Targets(2)}).ok());
  std::vector<uint8_t> mask(2);
  ledger.Reserve(3, {0, 2}, absl::MakeSpan(mask));
  ledger.Commit(3, {0, 2});
  ledger.Reserve(4, {0, 1}, absl::MakeSpan(mask).first(1));
  ledger.Commit(4, {0, 1});
  ledger.Reserve(5, {0, 2}, absl::MakeSpan(mask));
  ledger.Release(5, {0, 2});
  EXPECT_EQ(ledger.microbatches(), 5);
  EXPECT_EQ(ledger.begun_microbatches(), 4);
  EXPECT_THAT(ledger.CompleteIds(), ElementsAre(1, 2, 3));
}

TEST(LedgerTest, ListsWhatIsMissing) {
  Ledger ledger(1000, 10);
  ASSERT_TRUE(ledger.Declare(1, Terms(10), {2, 6}, {Targets(4)}).ok());
  std::vector<uint8_t> mask(2);
  ledger.Reserve(1, {3, 5}, absl::MakeSpan(mask));
  ledger.Commit(1, {3, 5});
  EXPECT_THAT(ledger.Missing({1, 9}),
              ElementsAre("microbatch 1: rows [0, 3), [5, 10) of 10", "microbatch 9: never opened"));
  std::vector<uint64_t> many(30);
  for (size_t i = 0; i < many.size(); ++i) many[i] = 100 + i;
  const auto lines = ledger.Missing(many, 20);
  ASSERT_EQ(lines.size(), 21u);
  EXPECT_EQ(lines.back(), "and 10 more microbatches");
}

}  // namespace
}  // namespace lossd::engine::ledger_test
