// SPDX-License-Identifier: Apache-2.0
// What happened lately, for people who look at a server: EventLog holds events that an operator wants to
// know, and TraceRecorder records for a short time what becomes of slices and chunks.
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
// gives it a new id and makes it the newest one, so a reader goes on with what came after the last id that it
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
  uint64_t id = 0;  // of its last change; ids begin with 1 and grow
  absl::Time first;
  absl::Time last;
  int64_t count = 1;  // how often it happened from `first` to `last`
  EventLevel level = EventLevel::kInfo;
  std::string kind;  // one of docs/watching.md#events, e.g. "head_created"
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

// As /events.json answers; see docs/watching.md. `incarnation` is of the server.
std::string ToJson(const EventLog::Reading& reading, uint64_t incarnation);

// TraceRecorder records, on request and for a short time, what becomes of slices and chunks, so that a person
// can look at the recording in Perfetto or in chrome://tracing.
//
// While nothing is recorded, Add costs one atomic load. A recording takes at most kMostSpans spans of 64
// bytes. It ends when its time is over or when it has that many spans, and is dropped when it is taken, or
// kKept after its end.
//
// Thread-safe.

// What a span is the time of. Of a slice: kReceive to kSend, as Phase. Of a chunk: kResults, from its forming
// until the results of its rows are there; kWeightGradient, from then until it has left the device. kStep is
// a moment: a step was closed.
enum class SpanKind : uint8_t { kReceive, kQueue, kCompute, kSend, kResults, kWeightGradient, kStep };

struct Span {
  SpanKind kind = SpanKind::kReceive;
  uint64_t id = 0;        // of a slice its microbatch, of a chunk any number of its own, of a step its number
  int64_t first_row = 0;  // of a slice, in its microbatch
  int64_t rows = 0;
  absl::Time begin;
  absl::Time end;
};

class TraceRecorder {
 public:
  static constexpr size_t kMostSpans = 20'000;
  static constexpr size_t kMostHeads = 256;  // further ones are recorded as one
  static constexpr absl::Duration kMostTime = absl::Seconds(30);
  static constexpr absl::Duration kKept = absl::Seconds(60);

  explicit TraceRecorder(absl::AnyInvocable<absl::Time() const> now = &clocks::SteadyNow)
      : now_(std::move(now)) {}

  // Begins a recording of so much time, and returns its number. INVALID_ARGUMENT if it is not in (0,
  // kMostTime], FAILED_PRECONDITION while another one is under way or waits to be taken.
  absl::StatusOr<uint64_t> Start(absl::Duration time) ABSL_LOCKS_EXCLUDED(mutex_);
  bool recording() const { return recording_.load(std::memory_order_relaxed); }
  // Does nothing unless a recording is under way that began before the span's end.
  void Add(absl::string_view head, const Span& span) ABSL_LOCKS_EXCLUDED(mutex_);

  // A recording that is over, in Chrome's Trace Event Format; the recorder forgets it. UNAVAILABLE while it
  // is under way, NOT_FOUND if there is none of this number.
  absl::StatusOr<std::string> Take(uint64_t number) ABSL_LOCKS_EXCLUDED(mutex_);
  // Drops a recording that was not taken in time. To be called now and then.
  void Expire() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Recorded {
    size_t head = 0;  // in heads_
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
  uint64_t number_ ABSL_GUARDED_BY(mutex_) = 0;  // of the recording that there is; 0: none
  absl::Time begin_ ABSL_GUARDED_BY(mutex_);
  absl::Time end_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> heads_ ABSL_GUARDED_BY(mutex_);
  std::vector<Recorded> spans_ ABSL_GUARDED_BY(mutex_);
  bool full_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_EVENTS_H_
