// SPDX-License-Identifier: Apache-2.0
#include "tests/server/engine/simulation/linear.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"

namespace lossd::engine::simulation {
namespace {

struct State {
  bool exists = false;
  uint64_t step = 0;
  std::optional<uint64_t> closed_last;  // the step before, if it was applied here
  friend auto operator<=>(const State&, const State&) = default;
};

// The state after the call; nothing if the call cannot be now.
std::optional<State> After(const State& state, const Call& call) {
  using What = Call::What;
  if (call.what == What::kCreated || call.what == What::kMaybeCreated)
    return state.exists ? std::nullopt : std::optional<State>(State{.exists = true});
  if (call.what == What::kNotFound) return state.exists ? std::nullopt : std::optional<State>(state);
  if (!state.exists) return std::nullopt;
  const bool open = state.step == call.step;
  State after = state;
  switch (call.what) {
    case What::kSees:
    case What::kZeroed:
      return open ? std::optional<State>(state) : std::nullopt;
    case What::kRefused:
      return open ? std::nullopt : std::optional<State>(state);
    case What::kApplied:
      after.step = call.step + 1;
      after.closed_last = call.step;
      return open ? std::optional<State>(after) : std::nullopt;
    case What::kRepeated:
      return state.closed_last == call.step ? std::optional<State>(state) : std::nullopt;
    case What::kLoaded:
    case What::kMaybe:
      after.step = call.step;
      after.closed_last.reset();
      return after;
    case What::kDeleted:
      return State{};
    default:
      return std::nullopt;
  }
}

class Search {
 public:
  explicit Search(std::vector<Call> calls) : calls_(std::move(calls)), done_(calls_.size()) {
    std::stable_sort(calls_.begin(), calls_.end(),
                     [](const Call& a, const Call& b) { return a.begin < b.begin; });
  }

  bool From(const State& state) {
    while (first_ < done_.size() && done_[first_]) ++first_;
    best_ = std::max(best_, count_);
    if (first_ == done_.size()) return true;
    if (!seen_.emplace(done_, state).second) return false;
    int64_t earliest_end = std::numeric_limits<int64_t>::max();
    for (size_t i = first_; i < calls_.size() && calls_[i].begin <= earliest_end; ++i) {
      if (!done_[i]) earliest_end = std::min(earliest_end, calls_[i].end);
    }
    const size_t first = first_;
    for (size_t i = first; i < calls_.size() && calls_[i].begin <= earliest_end; ++i) {
      if (done_[i]) continue;
      const std::optional<State> after = After(state, calls_[i]);
      if (after.has_value() && Try(i, *after)) return true;
      const bool optional =
          calls_[i].what == Call::What::kMaybe || calls_[i].what == Call::What::kMaybeCreated;
      if (optional && Try(i, state)) return true;
      first_ = first;
    }
    if (count_ == best_) stuck_ = Stuck(state, earliest_end);
    return false;
  }
  const std::string& stuck() const { return stuck_; }

 private:
  bool Try(size_t i, const State& state) {
    done_[i] = true;
    ++count_;
    if (From(state)) return true;
    done_[i] = false;
    --count_;
    return false;
  }
  std::string Stuck(const State& state, int64_t earliest_end) const {
    std::string text = state.exists ? absl::StrCat("step ", state.step, " is open") : "there is no head";
    absl::StrAppend(&text, ", and none of these can be next:");
    for (size_t i = first_; i < calls_.size() && calls_[i].begin <= earliest_end; ++i) {
      if (!done_[i]) absl::StrAppend(&text, " ", Describe(calls_[i]), ";");
    }
    return text;
  }

  std::vector<Call> calls_;
  std::vector<bool> done_;
  size_t first_ = 0, count_ = 0, best_ = 0;
  std::set<std::pair<std::vector<bool>, State>> seen_;
  std::string stuck_;
};

}  // namespace

std::string Describe(const Call& call) {
  static constexpr const char* kNames[] = {"sees",       "is refused", "applies",   "repeats",
                                           "zeroes",     "loads",      "deletes",   "creates",
                                           "finds none", "may load",   "may create"};
  return absl::StrCat("[", call.begin, ", ", call.end, "] ", kNames[static_cast<size_t>(call.what)], " step ",
                      call.step);
}

std::string FindNoOrder(const std::vector<Call>& calls) {
  Search search(calls);
  return search.From({}) ? "" : search.stuck();
}

}  // namespace lossd::engine::simulation
