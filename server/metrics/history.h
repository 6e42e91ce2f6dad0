// SPDX-License-Identifier: Apache-2.0
// The samples behind the charts of the status page. History holds what the server and each head did in the
// last 15 minutes, a sample every two seconds. Sampler takes the samples on a thread of its own.
//
// Both classes are thread-safe.
#ifndef LOSSD_SERVER_METRICS_HISTORY_H_
#define LOSSD_SERVER_METRICS_HISTORY_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "server/engine/engine.h"
#include "server/metrics/metrics.h"

namespace lossd::metrics {

// Series of the server. Rates are of the time of Sampler::kRateWindow, quantiles of Sampler::kQuantileWindow;
// NaN: there was nothing to measure. The order is that of their names (SeriesName).
enum class Series : uint8_t {
  kRows,        // per second
  kBytesIn,     // tensor bytes of slices, per second
  kBytesOut,    // the same
  kErrors,      // calls that ended with an error, per second
  kDeviceBusy,  // share of the time, in [0, 1]
  kQueuedSlices,
  kQueuedRows,
  kOpenStreams,
  kStagingBytes,   // in use
  kPlannedBytes,   // of all purposes
  kResidentBytes,  // of the process
  // Quantiles 0.5, 0.95 and 0.99 of the time, in seconds, of a microbatch and of its slices' phases: three
  // series each, in this order.
  kMicrobatch,
  kReceive = kMicrobatch + 3,
  kQueue = kReceive + 3,
  kCompute = kQueue + 3,
  kSend = kCompute + 3,
  kEnd = kSend + 3,
};
inline constexpr size_t kSeries = static_cast<size_t>(Series::kEnd);
absl::string_view SeriesName(size_t series);  // e.g. "rows_per_second"

// Series of a head: its rate, and what its last step said.
enum class HeadSeries : uint8_t { kRows, kLoss, kGradientNorm, kLearningRate };
inline constexpr size_t kHeadSeries = 4;
absl::string_view HeadSeriesName(size_t series);

using Values = std::array<float, kSeries>;
using HeadValues = std::array<float, kHeadSeries>;

// The last kSamples samples of the server and of each head.
//
// Memory: the ring has kSamples samples. Each sample has the values of all series of the server and of at
// most kMostHeads heads, four bytes a value: 60 KiB for the server, and 7 KiB for each head. The series of a
// head end with the head.
class History {
 public:
  static constexpr absl::Duration kInterval = absl::Seconds(2);
  static constexpr size_t kSamples = 450;
  static constexpr size_t kMostHeads = 64;

  // Adds a sample of the time `time`. The series of heads that are not in `heads` end. If there are more than
  // kMostHeads heads, the heads that came last have no series.
  void Add(absl::Time time, const Values& values, const std::map<std::string, HeadValues>& heads)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // The last sample; nullopt: there is none yet.
  std::optional<Values> Last() const ABSL_LOCKS_EXCLUDED(mutex_);

  // As /history.json answers (docs/operations.md): the samples with numbers above `after`; of the head `head`
  // only, if one is named. `incarnation` is of the server.
  std::string Json(uint64_t incarnation, uint64_t after, absl::string_view head) const
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // Of a head; by slot, as samples_.
  using Track = std::vector<HeadValues>;
  struct Sample {
    absl::Time time;
    Values values;
  };

  static size_t SlotOf(uint64_t number) { return number % kSamples; }

  mutable absl::Mutex mutex_;
  std::vector<Sample> samples_ ABSL_GUARDED_BY(mutex_);  // by slot
  std::map<std::string, Track, std::less<>> heads_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_ ABSL_GUARDED_BY(mutex_) = 0;  // number of the last sample; the first has 1
};

// Takes the samples of a History: what the server did since the samples before. It takes a sample once every
// History::kInterval, whether a page is open or not. So all viewers see the same rates, and the first viewer
// sees them at once. The sampler has a thread of its own from Start on, which ends with the object.
class Sampler {
 public:
  // Rates are means over so long, so that chunks that take seconds do not look like pauses.
  static constexpr absl::Duration kRateWindow = absl::Seconds(10);
  static constexpr absl::Duration kQuantileWindow = absl::Seconds(30);

  // All outlive the sampler.
  Sampler(const engine::Engine* engine, const kernels::Backend* backend, Metrics* metrics, History* history);
  ~Sampler();
  Sampler(const Sampler&) = delete;
  Sampler& operator=(const Sampler&) = delete;

  // Takes a sample now, and from now on the thread does. Called at most once.
  void Start();
  // Takes one sample, as of `now`, no earlier than the one before.
  void Sample(absl::Time now) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // Counters at one moment.
  struct Reading {
    absl::Time time;
    Totals totals;
    absl::Duration device_busy;
    std::map<std::string, int64_t> rows;  // by head
  };
  struct LatencyReading {
    absl::Time time;
    Latencies latencies;
  };

  void Run() ABSL_LOCKS_EXCLUDED(stop_mutex_);
  Values ServerValues(const Reading& now, const engine::EngineStats& stats) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const engine::Engine* const engine_;
  const kernels::Backend* const backend_;
  Metrics* const metrics_;
  History* const history_;

  absl::Mutex mutex_;
  // The readings of the windows, the oldest first; a window begins with the first reading.
  std::deque<Reading> readings_ ABSL_GUARDED_BY(mutex_);
  std::deque<LatencyReading> latencies_ ABSL_GUARDED_BY(mutex_);

  absl::Mutex stop_mutex_;
  bool stop_ ABSL_GUARDED_BY(stop_mutex_) = false;
  std::thread thread_;
};

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_HISTORY_H_
