#include "server/engine/ledger.h"

#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/backend.h"

namespace lossd::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int32_t kIgnored = kernels::kIgnoredTarget;

MicrobatchTerms Terms(int64_t rows) { return {.microbatch_rows = rows}; }

std::vector<int32_t> Targets(size_t rows, int32_t value = 1) { return std::vector<int32_t>(rows, value); }

TEST(LedgerTest, SettlesRowsOnce) {
  Ledger ledger(100);
  ASSERT_TRUE(ledger.Declare(7, Terms(4), {0, 4}, Targets(4), {}).ok());
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
  Ledger ledger(100);
  ASSERT_TRUE(ledger.Declare(1, Terms(3), {0, 3}, Targets(3), {}).ok());
  std::vector<uint8_t> mask(3);
  ledger.Reserve(1, {0, 3}, absl::MakeSpan(mask));
  ledger.Release(1, {0, 3});
  EXPECT_THAT(ledger.Missing({1}), ElementsAre("microbatch 1: rows [0, 3) of 3"));
  EXPECT_EQ(ledger.Reserve(1, {0, 3}, absl::MakeSpan(mask)), 0);
  EXPECT_THAT(mask, ElementsAre(1, 1, 1));
}

TEST(LedgerTest, IgnoredRowsSettleWithoutWork) {
  Ledger ledger(100);
  ASSERT_TRUE(ledger.Declare(1, Terms(3), {0, 3}, std::vector<int32_t>{kIgnored, 5, kIgnored}, {}).ok());
  std::vector<uint8_t> mask(3);
  EXPECT_EQ(ledger.Reserve(1, {0, 3}, absl::MakeSpan(mask)), 0);
  EXPECT_THAT(mask, ElementsAre(0, 1, 0));
  EXPECT_EQ(ledger.Commit(1, {0, 3}), 1);
  EXPECT_THAT(ledger.Missing({1}), IsEmpty());
  ASSERT_TRUE(ledger.Declare(2, Terms(2), {0, 2}, Targets(2, kIgnored), {}).ok());
  EXPECT_THAT(ledger.Missing({2}), IsEmpty());
  EXPECT_EQ(ledger.accumulated_rows(), 1);
}

TEST(LedgerTest, RefusesOtherContentsUnderTheSameId) {
  Ledger ledger(100);
  ASSERT_TRUE(ledger.Declare(1, Terms(8), {0, 4}, Targets(4), {}).ok());
  EXPECT_TRUE(ledger.Declare(1, Terms(8), {2, 6}, Targets(4), {}).ok());
  const absl::Status other_target = ledger.Declare(1, Terms(8), {5, 8}, std::vector<int32_t>{2, 1, 1}, {});
  EXPECT_EQ(other_target.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(other_target.message()), HasSubstr("row 5"));
  const std::vector<float> weights = {1.0f, 2.0f};
  EXPECT_EQ(ledger.Declare(1, Terms(8), {0, 2}, Targets(2), weights).code(),
            absl::StatusCode::kFailedPrecondition);
  MicrobatchTerms other_terms = Terms(8);
  other_terms.grad_output = 2.0f;
  EXPECT_EQ(ledger.Declare(1, other_terms, {6, 8}, Targets(2), {}).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ledger.declared_rows(), 6);  // the refused ones left nothing behind
  EXPECT_THAT(ledger.Missing({1}), ElementsAre("microbatch 1: rows [0, 8) of 8"));
}

TEST(LedgerTest, BoundsItsRows) {
  Ledger ledger(10);
  ASSERT_TRUE(ledger.Declare(1, Terms(8), {0, 8}, Targets(8), {}).ok());
  const absl::Status status = ledger.Declare(2, Terms(3), {0, 3}, Targets(3), {});
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ledger.microbatches(), 1);
  EXPECT_TRUE(ledger.Declare(1, Terms(8), {0, 8}, Targets(8), {}).ok());  // a repeat needs no room
  EXPECT_TRUE(ledger.Declare(2, Terms(2), {0, 2}, Targets(2), {}).ok());
  ledger.Clear();
  EXPECT_EQ(ledger.bytes(), 0);
  EXPECT_TRUE(ledger.Declare(3, Terms(10), {0, 10}, Targets(10), {}).ok());
}

TEST(LedgerTest, ListsWhatIsMissing) {
  Ledger ledger(1000);
  ASSERT_TRUE(ledger.Declare(1, Terms(10), {2, 6}, Targets(4), {}).ok());
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

// Random histories against a model that keeps one set of rows per microbatch.
TEST(LedgerTest, AgreesWithAPlainModelOnRandomHistories) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  const auto uniform = [&rng](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(rng);
  };
  for (int history = 0; history < 200; ++history) {
    const int64_t rows = uniform(1, 40);
    std::vector<int32_t> targets(static_cast<size_t>(rows));
    for (int32_t& t : targets) t = uniform(0, 4) == 0 ? kIgnored : static_cast<int32_t>(uniform(0, 9));
    Ledger ledger(1000);
    std::set<int64_t> declared, reserved, settled;
    for (int op = 0; op < 60; ++op) {
      const int64_t begin = uniform(0, rows);
      const RowRange range{begin, uniform(begin, rows)};
      std::vector<int64_t> in_range;
      bool all_declared = true;
      bool any_reserved = false;
      for (int64_t r = range.begin; r < range.end; ++r) {
        in_range.push_back(r);
        all_declared = all_declared && declared.contains(r);
        any_reserved = any_reserved || reserved.contains(r);
      }
      const auto valid = [&](int64_t r) { return targets[static_cast<size_t>(r)] != kIgnored; };
      if (declared.empty() || uniform(0, 3) == 0) {
        const auto piece = absl::MakeConstSpan(targets).subspan(static_cast<size_t>(range.begin),
                                                                static_cast<size_t>(range.size()));
        ASSERT_TRUE(ledger.Declare(5, Terms(rows), range, piece, {}).ok());
        declared.insert(in_range.begin(), in_range.end());
        for (int64_t r : in_range) {
          if (!valid(r)) settled.insert(r);
        }
      } else if (all_declared) {
        ASSERT_EQ(ledger.AnyReserved(5, range), any_reserved);
        if (any_reserved) {
          const bool commit = uniform(0, 1) == 0;
          int64_t expected = 0;
          for (int64_t r : in_range) {
            if (!reserved.erase(r)) continue;
            ++expected;
            if (commit) settled.insert(r);
          }
          if (commit) {
            ASSERT_EQ(ledger.Commit(5, range), expected);
          } else {
            ledger.Release(5, range);
          }
        } else {
          std::vector<uint8_t> mask(in_range.size(), 9);
          int64_t repeats = 0;
          std::vector<uint8_t> expected;
          for (int64_t r : in_range) {
            const bool fresh = !settled.contains(r);
            expected.push_back(fresh ? 1 : 0);
            repeats += valid(r) && !fresh ? 1 : 0;
            if (fresh) reserved.insert(r);
          }
          ASSERT_EQ(ledger.Reserve(5, range, absl::MakeSpan(mask)), repeats);
          ASSERT_EQ(mask, expected);
        }
      }
      int64_t accumulated = 0;
      for (int64_t r : settled) accumulated += valid(r) ? 1 : 0;
      ASSERT_EQ(ledger.accumulated_rows(), accumulated);
      ASSERT_EQ(ledger.Missing({5}).empty(), static_cast<int64_t>(settled.size()) == rows);
    }
  }
}

}  // namespace
}  // namespace lossd::engine
