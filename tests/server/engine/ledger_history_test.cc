// SPDX-License-Identifier: Apache-2.0
// The ledger against a model that keeps nothing but the history and works out everything from its beginning.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/backend.h"
#include "server/engine/errors.h"
#include "server/engine/ledger.h"

namespace lossd::engine::ledger_history_test {
namespace {

constexpr int32_t kIgnored = kernels::kIgnoredTarget;
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
}  // namespace lossd::engine::ledger_history_test
