// SPDX-License-Identifier: Apache-2.0
// EventLog holds the last kMost events of the server that an operator wants to know: heads that were created
// and deleted, steps that were skipped, checkpoints, errors of the device, and calls that ended with an
// error.
//
// An event that repeats itself, such as a refused call, is one event with a count. Each change of an event
// gives it a new id and makes it the newest one, so a reader goes on with what came after the last id that it
// has seen.
//
// Memory: at most kMost events, whose texts have at most kTextBytes each; 150 KiB in all. A client that is
// refused over and over adds one event for each method and code in ten minutes, so it does not drive the
// other events out.
//
// Thread-safe.
#ifndef LOSSD_SERVER_METRICS_EVENT_LOG_H_
#define LOSSD_SERVER_METRICS_EVENT_LOG_H_

#include <cstddef>
#include <cstdint>
#include <list>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"

namespace lossd::metrics {

enum class EventLevel : uint8_t { kInfo, kWarning, kError };
absl::string_view Name(EventLevel level);  // "info", "warning", "error"

struct Event {
  uint64_t id = 0;  // of its last change; ids begin with 1 and grow
  absl::Time first;
  absl::Time last;
  int64_t count = 1;  // how often it happened from `first` to `last`
  EventLevel level = EventLevel::kInfo;
  std::string kind;  // one of docs/operations.md#events, e.g. "head_created"
  std::string head;  // empty: it is not about one head
  std::string text;  // for people, UTF-8
};

class EventLog {
 public:
  static constexpr size_t kMost = 256;
  static constexpr size_t kTextBytes = 240;
  // Repeats are counted with an event that began at most so long ago.
  static constexpr absl::Duration kRun = absl::Minutes(10);

  explicit EventLog(absl::AnyInvocable<absl::Time() const> now = &clocks::WallNow) : now_(std::move(now)) {}

  void Add(EventLevel level, absl::string_view kind, absl::string_view head, absl::string_view text)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The same, but counts it with the event that equals it, if there is one.
  void Count(EventLevel level, absl::string_view kind, absl::string_view head, absl::string_view text)
      ABSL_LOCKS_EXCLUDED(mutex_);

  struct Reading {
    std::vector<Event> events;  // the oldest change first
    uint64_t last_id = 0;       // of all events; 0: there was none
    bool missed = false;        // events after the id have been dropped to make room
  };
  // The events with ids above `id`, the newest `most` of them.
  Reading After(uint64_t id, size_t most = kMost) const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Append(Event event) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const absl::AnyInvocable<absl::Time() const> now_;
  mutable absl::Mutex mutex_;
  std::list<Event> events_ ABSL_GUARDED_BY(mutex_);  // by id
  uint64_t last_id_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t dropped_id_ ABSL_GUARDED_BY(mutex_) = 0;  // the largest of those that made room
};

// As /events.json answers; see docs/operations.md. `incarnation` is of the server.
std::string ToJson(const EventLog::Reading& reading, uint64_t incarnation);

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_EVENT_LOG_H_
