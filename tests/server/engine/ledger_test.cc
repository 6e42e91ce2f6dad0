// SPDX-License-Identifier: Apache-2.0
// Tests of ledger.h: the ledger of contributions and the ledger of microbatch rows.
#include "server/engine/ledger.h"

#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/backend.h"
#include "kernels/errors/field_error.h"
#include "server/engine/errors.h"

// ---- Contribution ledger ----

namespace lossd::engine::contribution_ledger_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

ContributionTerms Terms(RowRange rows) { return {.rows = rows}; }

TEST(ContributionLedgerTest, KnowsWhatWasAddedAndWhatIsMissing) {
  ContributionLedger ledger(100, 4);
  EXPECT_FALSE(ledger.Contains(7));
  ASSERT_TRUE(ledger.Declare(7, Terms({10, 20})).ok());
  EXPECT_TRUE(ledger.Contains(7));
  EXPECT_EQ(ledger.DescribeMissing(7), "contribution 7: rows [10, 20) of [10, 20)");
  const std::vector<uint64_t> sums = {1, 2, 3, 4, 5};
  EXPECT_THAT(*ledger.Pending(7, {12, 17}, sums), ElementsAre(RowRange{12, 17}));
  ledger.Commit(7, {12, 14}, {1, 2});
  ledger.Commit(7, {15, 16}, {4});
  EXPECT_THAT(*ledger.Pending(7, {12, 17}, sums), ElementsAre(RowRange{14, 15}, RowRange{16, 17}));
  EXPECT_FALSE(ledger.Complete(7));
  EXPECT_EQ(ledger.DescribeMissing(7), "contribution 7: rows [10, 12), [14, 15), [16, 20) of [10, 20)");
  EXPECT_EQ(ledger.rows(), 10);
  EXPECT_GE(ledger.bytes(), 80);
  ledger.Clear();
  EXPECT_FALSE(ledger.Contains(7));
  EXPECT_EQ(ledger.rows(), 0);
}

TEST(ContributionLedgerTest, RefusesOtherContentsUnderTheSameId) {
  ContributionLedger ledger(100, 4);
  ASSERT_TRUE(ledger.Declare(1, Terms({0, 4})).ok());
  EXPECT_TRUE(ledger.Declare(1, Terms({0, 4})).ok());
  ContributionTerms other[4] = {Terms({0, 5}), Terms({0, 4}), Terms({0, 4}), Terms({0, 4})};
  other[1].param = kernels::Param::kBias;
  other[2].dtype = kernels::DType::kFloat16;
  other[3].scale = 2.0f;
  for (const ContributionTerms& terms : other) {
    EXPECT_EQ(ledger.Declare(1, terms).code(), absl::StatusCode::kFailedPrecondition);
  }
  ledger.Commit(1, {2, 3}, {9});
  const absl::Status changed = ledger.Pending(1, {0, 4}, {9, 9, 8, 9}).status();
  EXPECT_EQ(changed.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(changed.message()), HasSubstr("row 2 was added before to contribution 1"));
}

TEST(ContributionLedgerTest, IsBounded) {
  ContributionLedger ledger(10, 4);
  ASSERT_TRUE(ledger.Declare(1, Terms({0, 6})).ok());
  EXPECT_EQ(ledger.Declare(2, Terms({0, 5})).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE(ledger.Contains(2));
  EXPECT_TRUE(ledger.Declare(3, Terms({0, 4})).ok());
  EXPECT_TRUE(ledger.Declare(4, Terms({3, 3})).ok());
  EXPECT_TRUE(ledger.Complete(4)) << "nothing to add";
  ASSERT_TRUE(ledger.Declare(5, Terms({3, 3})).ok());
  const absl::Status full = ledger.Declare(6, Terms({3, 3}));
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  const auto full_field = errors::GetFieldViolation(full).value_or(errors::FieldViolation());
  EXPECT_EQ(full_field.field, "open.contribution_id");
  EXPECT_EQ(full_field.value, "6");
  EXPECT_TRUE(ledger.Declare(5, Terms({3, 3})).ok());
}

TEST(ContributionLedgerTest, CountsWhatIsPartOfTheSum) {
  ContributionLedger ledger(100, 4);
  for (uint64_t id : {1, 2, 3}) ASSERT_TRUE(ledger.Declare(id, Terms({0, 2})).ok());
  ASSERT_TRUE(ledger.Declare(4, Terms({7, 7})).ok());  // nothing to add
  ledger.Commit(2, {0, 1}, {5});
  ledger.Commit(3, {0, 2}, {5, 6});
  EXPECT_EQ(ledger.begun_contributions(), 3);
  EXPECT_THAT(ledger.CompleteIds(), ElementsAre(3, 4));
  const std::string half = "contribution 2: rows [1, 2) of [0, 2) (not expected, but begun)";
  EXPECT_THAT(ledger.Incomplete({1, 3}), ElementsAre(half));
  EXPECT_THAT(ledger.Incomplete({2}), IsEmpty());
  EXPECT_THAT(ledger.Incomplete({}, /*max_lines=*/0), IsEmpty());
}

// Random slices of random contents against a map of rows.
TEST(ContributionLedgerTest, AgreesWithAPlainModel) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  const auto below = [&random](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  constexpr int64_t kRows = 24;
  ContributionLedger ledger(3 * kRows, 4);
  std::map<std::pair<uint64_t, int64_t>, uint64_t> added;  // (id, row) -> checksum
  for (uint64_t id = 0; id < 3; ++id) ASSERT_TRUE(ledger.Declare(id, Terms({5, 5 + kRows})).ok());
  for (int i = 0; i < 2000; ++i) {
    const auto id = static_cast<uint64_t>(below(3));
    const int64_t begin = 5 + below(kRows);
    const RowRange rows{begin, begin + 1 + below(5 + kRows - begin)};
    std::vector<uint64_t> sums;
    std::vector<RowRange> want;
    bool differs = false;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      sums.push_back(static_cast<uint64_t>(100 + row + (below(100) == 0 ? 1 : 0)));
      const auto it = added.find({id, row});
      if (it != added.end() && it->second != sums.back()) differs = true;
      if (it != added.end()) continue;
      if (want.empty() || want.back().end != row) want.push_back({row, row});
      ++want.back().end;
    }
    const auto pending = ledger.Pending(id, rows, sums);
    ASSERT_EQ(pending.ok(), !differs);
    if (differs) continue;
    ASSERT_EQ(*pending, want);
    if (below(4) == 0) continue;  // as if the device had refused it
    ledger.Commit(id, rows, sums);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      added[{id, row}] = sums[static_cast<size_t>(row - rows.begin)];
    }
    int64_t rows_of_id = 0;
    for (const auto& [key, sum] : added) rows_of_id += key.first == id ? 1 : 0;
    ASSERT_EQ(ledger.Complete(id), rows_of_id == kRows);
  }
}

}  // namespace
}  // namespace lossd::engine::contribution_ledger_test

// ---- Ledger ----

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
