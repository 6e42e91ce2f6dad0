// SPDX-License-Identifier: Apache-2.0
// How many lines of one kind may be logged: some at once, and one a second from then on. For lines that
// a client without rights can cause, which could fill a disk with them.
//
// Thread-safe.
#ifndef LOSSD_SERVER_LOG_LINE_BUDGET_H_
#define LOSSD_SERVER_LOG_LINE_BUDGET_H_

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"

namespace lossd::log {

class LineBudget {
 public:
  explicit LineBudget(int64_t at_once, std::function<absl::Time()> now = &clocks::SteadyNow)
      : at_once_(at_once), now_(std::move(now)), lines_(at_once) {}

  // Null: the line is to be left out. Else how many were left out since the last one.
  std::optional<int64_t> Take() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  const int64_t at_once_;
  const std::function<absl::Time()> now_;
  absl::Mutex mutex_;
  int64_t lines_ ABSL_GUARDED_BY(mutex_);  // that may be logged at once
  absl::Time refilled_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  int64_t left_out_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Budgets of several holders, for example peers, and one of all of them together. Of a holder that has been
// quiet longest nothing is remembered when there are more than kMostHolders; so what they may log is bounded
// by the budget of all.
//
// Thread-safe.
class LineBudgets {
 public:
  static constexpr size_t kMostHolders = 1'000;

  LineBudgets(int64_t at_once, int64_t at_once_of_all, std::function<absl::Time()> now = &clocks::SteadyNow)
      : at_once_(at_once), now_(now), all_(at_once_of_all, std::move(now)) {}

  // As LineBudget::Take, of the holder's lines.
  std::optional<int64_t> Take(absl::string_view holder) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Holder {
    std::unique_ptr<LineBudget> budget;
    int64_t left_out_by_all = 0;
    std::list<std::string>::iterator place;  // in order_
  };

  const int64_t at_once_;
  const std::function<absl::Time()> now_;
  LineBudget all_;
  absl::Mutex mutex_;
  std::list<std::string> order_ ABSL_GUARDED_BY(mutex_);  // last heard of last
  std::map<std::string, Holder, std::less<>> holders_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::log

#endif  // LOSSD_SERVER_LOG_LINE_BUDGET_H_
