// SPDX-License-Identifier: Apache-2.0
// Recent events of the server, for people who look at it. EventLog holds the events that an operator wants to
// know. TraceRecorder records, for a short time, when each slice and chunk passes through the phases of its
// computation.
//
// Both classes are thread-safe.
#ifndef LOSSD_SERVER_METRICS_EVENTS_H_
#define LOSSD_SERVER_METRICS_EVENTS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"

namespace lossd::metrics {

// EventLog holds the last kMost events of the server that an operator wants to know: heads that were created
// and deleted, steps that were skipped, checkpoints, errors of the device, and calls that ended with an
// error.
//
// An event that repeats itself, such as a refused call, is one event with a count. Each change of an event
// gives it a new id and makes it the newest event. So a reader asks for the events after the last id that it
// has seen.
//
// Memory: at most kMost events, whose texts have at most kTextBytes each; 150 KiB in all. A client that is
// refused over and over adds one event for each method and code in ten minutes, so it does not drive the
// other events out.
//
// Thread-safe.

enum class EventLevel : uint8_t { kInfo, kWarning, kError };
absl::string_view Name(EventLevel level);  // "info", "warning", "error"

struct Event {
  uint64_t id = 0;  // changes with each change of the event; ids begin with 1 and grow
  absl::Time first;
  absl::Time last;
  int64_t count = 1;  // how often the event happened from `first` to `last`
  EventLevel level = EventLevel::kInfo;
  std::string kind;  // a kind of docs/watching.md#events, e.g. "head_created"
  std::string head;  // the head's name; empty: the event is not about one head
  std::string text;  // for people, UTF-8
};

class EventLog {
 public:
  static constexpr size_t kMost = 256;
  static constexpr size_t kTextBytes = 240;
  // A repeated event is counted with an earlier event only if that event began at most this long ago.
  static constexpr absl::Duration kRun = absl::Minutes(10);

  explicit EventLog(absl::AnyInvocable<absl::Time() const> now = &clocks::WallNow) : now_(std::move(now)) {}

  void Add(EventLevel level, absl::string_view kind, absl::string_view head, absl::string_view text)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The same, but if an equal event exists, increments its count instead of adding an event.
  void Count(EventLevel level, absl::string_view kind, absl::string_view head, absl::string_view text)
      ABSL_LOCKS_EXCLUDED(mutex_);

  struct Reading {
    std::vector<Event> events;  // the oldest change first
    uint64_t last_id = 0;       // the last id of all events; 0: there was no event
    bool missed = false;        // some events after the id have been dropped to make room
  };
  // The newest `most` events among those with ids above `id`.
  Reading After(uint64_t id, size_t most = kMost) const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Append(Event event) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const absl::AnyInvocable<absl::Time() const> now_;
  mutable absl::Mutex mutex_;
  std::list<Event> events_ ABSL_GUARDED_BY(mutex_);  // by id
  uint64_t last_id_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t dropped_id_ ABSL_GUARDED_BY(mutex_) = 0;  // the largest id that was dropped to make room
};

// The body of the answer to /events.json (docs/watching.md). `incarnation`: the number of the server process.
std::string ToJson(const EventLog::Reading& reading, uint64_t incarnation);

// TraceRecorder records the phases of slices and chunks, on request and for a short time. A person looks at
// the recording in Perfetto or in chrome://tracing.
//
// While nothing is recorded, Add costs one atomic load. A recording takes at most kMostSpans spans of 64
// bytes. It ends when its time is over or when it has that many spans. It is dropped when it is taken, or
// kKept after its end.
//
// Thread-safe.

// What happens during a span.
// - Of a slice: kReceive to kSend, which are the phases of Phase (metrics.h).
// - Of a chunk: kResults lasts until the results of its rows are ready; kWeightGradient follows until the
//   chunk has left the device.
// - kStep is a moment: a step was closed.
enum class SpanKind : uint8_t { kReceive, kQueue, kCompute, kSend, kResults, kWeightGradient, kStep };

struct Span {
  SpanKind kind = SpanKind::kReceive;
  // The microbatch of a slice, a unique number of a chunk, or the number of a step.
  uint64_t id = 0;
  int64_t first_row = 0;  // the first row of a slice in its microbatch
  int64_t rows = 0;
  absl::Time begin;
  absl::Time end;
};

class TraceRecorder {
 public:
  static constexpr size_t kMostSpans = 20'000;
  static constexpr size_t kMostHeads = 256;  // further heads are recorded as one
  static constexpr absl::Duration kMostTime = absl::Seconds(30);
  static constexpr absl::Duration kKept = absl::Seconds(60);

  explicit TraceRecorder(absl::AnyInvocable<absl::Time() const> now = &clocks::SteadyNow)
      : now_(std::move(now)) {}

  // Begins a recording that lasts `time`, and returns its number. INVALID_ARGUMENT if `time` is not in (0,
  // kMostTime]. FAILED_PRECONDITION while another recording is under way or waits to be taken.
  absl::StatusOr<uint64_t> Start(absl::Duration time) ABSL_LOCKS_EXCLUDED(mutex_);
  bool recording() const { return recording_.load(std::memory_order_relaxed); }
  // Adds a span. Does nothing unless a recording is under way that began before the span's end.
  void Add(absl::string_view head, const Span& span) ABSL_LOCKS_EXCLUDED(mutex_);

  // Returns a finished recording in Chrome's Trace Event Format, and drops it. UNAVAILABLE while the
  // recording is under way, NOT_FOUND if there is no recording of this number.
  absl::StatusOr<std::string> Take(uint64_t number) ABSL_LOCKS_EXCLUDED(mutex_);
  // Drops a recording that was not taken in time. Call it regularly.
  void Expire() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Recorded {
    size_t head = 0;  // index in heads_
    Span span;
  };

  bool UnderWay(absl::Time now) const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return number_ != 0 && now < end_;
  }
  size_t HeadNumber(absl::string_view head) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string Json() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);

  const absl::AnyInvocable<absl::Time() const> now_;
  std::atomic<bool> recording_{false};
  absl::Mutex mutex_;
  uint64_t last_number_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t number_ ABSL_GUARDED_BY(mutex_) = 0;  // the number of the current recording; 0: none
  absl::Time begin_ ABSL_GUARDED_BY(mutex_);
  absl::Time end_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> heads_ ABSL_GUARDED_BY(mutex_);
  std::vector<Recorded> spans_ ABSL_GUARDED_BY(mutex_);
  bool full_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_EVENTS_H_
