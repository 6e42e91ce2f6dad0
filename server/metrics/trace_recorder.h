// SPDX-License-Identifier: Apache-2.0
// TraceRecorder records, on request and for a short time, what becomes of slices and chunks, so that a person
// can look at the recording in Perfetto or in chrome://tracing.
//
// While nothing is recorded, Add costs one atomic load. A recording takes at most kMostSpans spans of 64
// bytes. It ends when its time is over or when it has that many spans, and is dropped when it is taken, or
// kKept after its end.
//
// Thread-safe.
#ifndef LOSSD_SERVER_METRICS_TRACE_RECORDER_H_
#define LOSSD_SERVER_METRICS_TRACE_RECORDER_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
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

#endif  // LOSSD_SERVER_METRICS_TRACE_RECORDER_H_
