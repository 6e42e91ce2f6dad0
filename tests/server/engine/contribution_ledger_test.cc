// SPDX-License-Identifier: Apache-2.0
#include "server/engine/contribution_ledger.h"

#include <map>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/errors/field_error.h"
#include "server/engine/errors.h"

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
