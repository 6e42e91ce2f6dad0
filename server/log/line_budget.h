// SPDX-License-Identifier: Apache-2.0
// How many lines of one kind may be logged: some at once, and one a second from then on. For lines that
// a client without rights can cause, which could fill a disk with them.
//
// Thread-safe.
#ifndef LOSSD_SERVER_LOG_LINE_BUDGET_H_
#define LOSSD_SERVER_LOG_LINE_BUDGET_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace lossd::log {

class LineBudget {
 public:
  explicit LineBudget(int64_t at_once, std::function<absl::Time()> now = &absl::Now)
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

}  // namespace lossd::log

#endif  // LOSSD_SERVER_LOG_LINE_BUDGET_H_
