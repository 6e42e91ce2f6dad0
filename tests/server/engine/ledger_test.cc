// SPDX-License-Identifier: Apache-2.0
// Tests of ledger.h: the ledger of contributions, the ledger of microbatch rows, and the ledger of rows
// against a model that keeps nothing but the history.
#include "server/engine/ledger.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
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

// ---- Contribution ledger ----

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

// ---- Ledger ----

constexpr int32_t kIgnored = kernels::kIgnoredTarget;

MicrobatchTerms Terms(int64_t rows) { return {.microbatch_rows = rows}; }

TEST(MicrobatchTermsTest, DepthsFollowEachOther) {
  MicrobatchTerms terms = Terms(10);
  EXPECT_EQ(terms.DepthOf(9), 0u);
  EXPECT_EQ(terms.EndOfDepth(3), 10);
  EXPECT_EQ(terms.HostBytes(), 0);
  for (const int64_t end : {4, 4, 9, 10}) terms.depths.push_back({.end = end});
  for (const auto& [row, depth] : {std::pair{0, 0u}, {3, 0u}, {4, 2u}, {8, 2u}, {9, 3u}}) {
    EXPECT_EQ(terms.DepthOf(row), depth) << row;
    EXPECT_EQ(terms.EndOfDepth(row), terms.depths[depth].end) << row;
  }
  // What the ledger keeps of them counts.
  const RowContents contents{.targets = {}};
  Ledger with(100, 4), without(100, 4);
  ASSERT_TRUE(with.Declare(1, terms, {0, 0}, contents).ok());
  ASSERT_TRUE(without.Declare(1, Terms(10), {0, 0}, contents).ok());
  EXPECT_EQ(with.bytes() - without.bytes(), terms.HostBytes());
  EXPECT_GT(terms.HostBytes(), 0);
  MicrobatchTerms other = terms;
  other.depths[2].weight = 2.0f;
  EXPECT_EQ(with.Declare(1, other, {0, 0}, contents).code(), absl::StatusCode::kFailedPrecondition);
}

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
  EXPECT_THAT(values.numbers.advantages, IsEmpty());
  EXPECT_GE(ledger.bytes(), 4 * 5 + 2 * 4);
  EXPECT_LE(ledger.bytes(), 4 * 5 + 2 * 4 + 3 * 300) << "a microbatch and two runs of rows";
}

TEST(LedgerTest, RefusesOtherGradientsUnderTheSameId) {
  using Floats = absl::Span<const float> RowContents::*;
  for (const auto& [floats, if_absent] : {std::pair<Floats, float>(&RowContents::row_weights, 1.0f),
                                          {&RowContents::grad_loss, 1.0f},
                                          {&RowContents::grad_lse, 0.0f},
                                          {&RowContents::grad_entropy, 0.0f},
                                          {&RowContents::advantages, 0.0f},
                                          {&RowContents::old_logprobs, 0.0f},
                                          {&RowContents::ref_logprobs, 0.0f}}) {
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

// ---- Histories ----
// The ledger against a model that keeps nothing but the history and works out everything from its beginning.

constexpr int64_t kMaxRows = 60;
constexpr int64_t kMaxMicrobatches = 3;

enum class Act { kDeclare, kReserve, kCommit, kRelease, kClear };

struct Event {
  Act act = Act::kClear;
  uint64_t id = 0;
  RowRange rows;
  MicrobatchTerms terms;
  std::vector<int32_t> targets;
  std::vector<float> weights;  // empty: all 1
  std::vector<float> lse;      // empty: all 0

  int32_t target(int64_t row) const { return targets[static_cast<size_t>(row - rows.begin)]; }
  float weight(int64_t row) const {
    return weights.empty() ? 1.0f : weights[static_cast<size_t>(row - rows.begin)];
  }
  float grad_lse(int64_t row) const {
    return lse.empty() ? 0.0f : lse[static_cast<size_t>(row - rows.begin)];
  }
  bool SameRow(const Event& other, int64_t row) const {
    return target(row) == other.target(row) && weight(row) == other.weight(row) &&
           grad_lse(row) == other.grad_lse(row);
  }
};

enum class State { kUnknown, kPending, kReserved, kSettled };

// What a history of successful events amounts to, row by row.
class Model {
 public:
  void Happened(Event event) { history_.push_back(std::move(event)); }

  // The event that declared a row first; null if none did.
  const Event* Declaration(uint64_t id, int64_t row) const {
    const Event* found = nullptr;
    ForEach(
        id, row,
        [&](const Event& e) {
          if (e.act == Act::kDeclare && found == nullptr) found = &e;
        },
        [&] { found = nullptr; });
    return found;
  }
  State StateOf(uint64_t id, int64_t row) const {
    State state = State::kUnknown;
    ForEach(
        id, row,
        [&](const Event& e) {
          if (e.act == Act::kDeclare && state == State::kUnknown)
            state = e.target(row) == kIgnored ? State::kSettled : State::kPending;
          if (e.act == Act::kReserve && state == State::kPending) state = State::kReserved;
          if (e.act == Act::kCommit && state == State::kReserved) state = State::kSettled;
          if (e.act == Act::kRelease && state == State::kReserved) state = State::kPending;
        },
        [&] { state = State::kUnknown; });
    return state;
  }
  bool IsIgnored(uint64_t id, int64_t row) const { return Declaration(id, row)->target(row) == kIgnored; }
  std::optional<MicrobatchTerms> TermsOf(uint64_t id) const {
    std::optional<MicrobatchTerms> terms;
    for (const Event& e : history_) {
      if (e.act == Act::kClear) terms.reset();
      if (e.act == Act::kDeclare && e.id == id && !terms.has_value()) terms = e.terms;
    }
    return terms;
  }
  template <typename Predicate>
  int64_t Count(const std::vector<uint64_t>& ids, Predicate predicate) const {
    int64_t count = 0;
    for (uint64_t id : ids) {
      const auto terms = TermsOf(id);
      for (int64_t row = 0; terms.has_value() && row < terms->microbatch_rows; ++row)
        count += predicate(id, row) ? 1 : 0;
    }
    return count;
  }
  std::vector<std::string> Missing(const std::vector<uint64_t>& ids) const {
    std::vector<std::string> lines;
    for (uint64_t id : ids) {
      const auto terms = TermsOf(id);
      if (!terms.has_value()) {
        lines.push_back(absl::StrCat("microbatch ", id, ": never opened"));
        continue;
      }
      std::string ranges;
      int count = 0;
      for (int64_t row = 0; row < terms->microbatch_rows;) {
        int64_t end = row;
        while (end < terms->microbatch_rows && StateOf(id, end) != State::kSettled) ++end;
        if (end > row && ++count <= 8) absl::StrAppend(&ranges, ranges.empty() ? "" : ", ", Text({row, end}));
        row = end + 1;
      }
      if (count > 8) absl::StrAppend(&ranges, " and ", count - 8, " more ranges");
      if (count > 0)
        lines.push_back(absl::StrCat("microbatch ", id, ": rows ", ranges, " of ", terms->microbatch_rows));
    }
    return lines;
  }

 private:
  template <typename Fn, typename Forget>
  void ForEach(uint64_t id, int64_t row, Fn fn, Forget forget) const {
    for (const Event& e : history_) {
      if (e.act == Act::kClear) {
        forget();
      } else if (e.id == id && e.rows.begin <= row && row < e.rows.end) {
        fn(e);
      }
    }
  }

  std::vector<Event> history_;
};

class LedgerHistoryTest : public ::testing::Test {
 protected:
  int64_t Uniform(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(rng_);
  }

  // Contents of row `row` of microbatch `id`, the same whenever asked.
  static int32_t Target(uint64_t id, int64_t row) {
    const auto mixed = static_cast<int32_t>((id * 7 + static_cast<uint64_t>(row) * 13) % 11);
    return mixed < 2 ? kIgnored : mixed;
  }
  static float Weight(uint64_t id, int64_t row) {
    return id == 2 ? static_cast<float>((static_cast<uint64_t>(row) * 5) % 3) : 1.0f;
  }

  static float GradLse(uint64_t id, int64_t row) {
    return id == 3 ? static_cast<float>((static_cast<uint64_t>(row) * 7) % 4) : 0.0f;
  }

  void TryDeclare() {
    Event event{.act = Act::kDeclare, .id = static_cast<uint64_t>(Uniform(0, 3))};
    event.terms.microbatch_rows = 8 + 6 * static_cast<int64_t>(event.id);
    event.rows.begin = Uniform(0, event.terms.microbatch_rows);
    event.rows.end = Uniform(event.rows.begin, event.terms.microbatch_rows);
    const bool weighted = event.id == 2 || Uniform(0, 3) == 0;
    const bool with_lse = event.id == 3 || Uniform(0, 3) == 0;
    for (int64_t row = event.rows.begin; row < event.rows.end; ++row) {
      event.targets.push_back(Target(event.id, row));
      if (weighted) event.weights.push_back(Weight(event.id, row));
      if (with_lse) event.lse.push_back(GradLse(event.id, row));
    }
    const bool lie = Uniform(0, 5) == 0;
    if (lie && Uniform(0, 3) == 0) event.terms.grad_output = 2.0f;
    if (lie && event.rows.size() > 0) {
      const auto i = static_cast<size_t>(Uniform(0, event.rows.size() - 1));
      const int64_t kind = Uniform(0, 2);
      if (kind == 0) event.targets[i] = event.targets[i] == 9 ? kIgnored : 9;
      if (kind == 1 && weighted) event.weights[i] += 1.0f;
      if (kind == 2 && with_lse) event.lse[i] += 1.0f;
    }
    const absl::Status got =
        ledger_.Declare(event.id, event.terms, event.rows,
                        {.targets = event.targets, .row_weights = event.weights, .grad_lse = event.lse});
    ASSERT_EQ(got.code(), ExpectedOfDeclare(event)) << got;
    if (got.ok()) model_.Happened(event);
  }
  absl::StatusCode ExpectedOfDeclare(const Event& event) const {
    const auto terms = model_.TermsOf(event.id);
    if (terms.has_value() && !(*terms == event.terms)) return absl::StatusCode::kFailedPrecondition;
    int64_t added = 0;
    for (int64_t row = event.rows.begin; row < event.rows.end; ++row) {
      const Event* known = model_.Declaration(event.id, row);
      added += known == nullptr ? 1 : 0;
      if (known != nullptr && !known->SameRow(event, row)) return absl::StatusCode::kFailedPrecondition;
    }
    const bool too_many = !terms.has_value() && Known() >= kMaxMicrobatches;
    return too_many || DeclaredRows() + added > kMaxRows ? absl::StatusCode::kResourceExhausted
                                                         : absl::StatusCode::kOk;
  }
  int64_t Known() const {
    return std::count_if(kIds.begin(), kIds.end(),
                         [&](uint64_t id) { return model_.TermsOf(id).has_value(); });
  }
  int64_t DeclaredRows() const {
    return model_.Count(kIds,
                        [&](uint64_t id, int64_t row) { return model_.StateOf(id, row) != State::kUnknown; });
  }

  // Some declared rows; empty if the draw hits others.
  std::optional<Event> DrawDeclared() {
    Event event{.id = static_cast<uint64_t>(Uniform(0, 3))};
    const auto terms = model_.TermsOf(event.id);
    if (!terms.has_value()) return std::nullopt;
    event.rows.begin = Uniform(0, terms->microbatch_rows);
    event.rows.end = Uniform(event.rows.begin, terms->microbatch_rows);
    for (int64_t row = event.rows.begin; row < event.rows.end; ++row) {
      if (model_.StateOf(event.id, row) == State::kUnknown) return std::nullopt;
    }
    return event;
  }

  void TryCompute() {
    std::optional<Event> event = DrawDeclared();
    if (!event.has_value()) return;
    int64_t reserved = 0, repeats = 0;
    std::vector<uint8_t> fresh;
    for (int64_t row = event->rows.begin; row < event->rows.end; ++row) {
      const State state = model_.StateOf(event->id, row);
      reserved += state == State::kReserved ? 1 : 0;
      fresh.push_back(state == State::kPending ? 1 : 0);
      repeats += state == State::kSettled && !model_.IsIgnored(event->id, row) ? 1 : 0;
    }
    ASSERT_EQ(ledger_.AnyReserved(event->id, event->rows), reserved > 0);
    if (reserved == 0) {
      std::vector<uint8_t> mask(fresh.size(), 9);
      ASSERT_EQ(ledger_.Reserve(event->id, event->rows, absl::MakeSpan(mask)), repeats);
      ASSERT_EQ(mask, fresh);
      event->act = Act::kReserve;
    } else if (Uniform(0, 1) == 0) {
      ASSERT_EQ(ledger_.Commit(event->id, event->rows), reserved);
      event->act = Act::kCommit;
    } else {
      ledger_.Release(event->id, event->rows);
      event->act = Act::kRelease;
    }
    model_.Happened(*event);
  }

  // Reserved rows are never forgotten: they are on a device.
  void TryClear() {
    const int64_t reserved = model_.Count(
        kIds, [&](uint64_t id, int64_t row) { return model_.StateOf(id, row) == State::kReserved; });
    if (reserved > 0) return;
    ledger_.Clear();
    model_.Happened({.act = Act::kClear});
  }

  void Compare() {
    ASSERT_EQ(ledger_.declared_rows(), DeclaredRows());
    ASSERT_EQ(ledger_.accumulated_rows(), model_.Count(kIds, [&](uint64_t id, int64_t row) {
      return model_.StateOf(id, row) == State::kSettled && !model_.IsIgnored(id, row);
    }));
    ASSERT_EQ(ledger_.Missing(kIds), model_.Missing(kIds));
    std::vector<uint64_t> complete;
    int64_t begun = 0;
    for (uint64_t id : kIds) {
      const bool whole = model_.TermsOf(id).has_value() && model_.Missing({id}).empty();
      const int64_t accumulated = model_.Count({id}, [&](uint64_t, int64_t row) {
        return model_.StateOf(id, row) == State::kSettled && !model_.IsIgnored(id, row);
      });
      if (whole) complete.push_back(id);
      begun += whole || accumulated > 0 ? 1 : 0;
    }
    ASSERT_EQ(ledger_.CompleteIds(), complete);
    ASSERT_EQ(ledger_.begun_microbatches(), begun);
    for (uint64_t id : kIds) {
      const auto terms = model_.TermsOf(id);
      ASSERT_EQ(ledger_.MicrobatchRows(id).has_value(), terms.has_value());
      const RowRange rows{Uniform(0, 3), Uniform(3, 8)};
      std::vector<uint8_t> mask(static_cast<size_t>(rows.size())), expected;
      for (int64_t row = rows.begin; row < rows.end; ++row)
        expected.push_back(model_.StateOf(id, row) == State::kSettled ? 0 : 1);
      ledger_.MarkUnsettled(id, rows, absl::MakeSpan(mask));
      ASSERT_EQ(mask, expected);
      ASSERT_EQ(ledger_.CountUnsettled(id, rows), std::count(expected.begin(), expected.end(), 1));
    }
  }

  const std::vector<uint64_t> kIds = {0, 1, 2, 3};
  std::mt19937_64 rng_;
  Ledger ledger_{kMaxRows, kMaxMicrobatches};
  Model model_;
};

TEST_F(LedgerHistoryTest, AgreesWithAModelThatRecomputesFromScratch) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  rng_.seed(seed);
  for (int history = 0; history < 1000; ++history) {
    ledger_.Clear();
    model_ = Model();
    for (int i = 0; i < 60; ++i) {
      const int64_t choice = Uniform(0, 19);
      if (choice == 0) {
        TryClear();
      } else if (choice < 8) {
        TryDeclare();
      } else {
        TryCompute();
      }
      Compare();
      if (HasFatalFailure()) return;
    }
  }
}

}  // namespace
}  // namespace lossd::engine::ledger_test
