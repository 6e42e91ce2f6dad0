// SPDX-License-Identifier: Apache-2.0
// Takes the samples of a History: what the server did since the samples before, once every
// History::kInterval, whether somebody looks or not. So all viewers see the same rates, and the first one
// sees them too.
//
// Thread-safe. Has a thread of its own from Start on, which ends with the object.
#ifndef LOSSD_SERVER_METRICS_SAMPLER_H_
#define LOSSD_SERVER_METRICS_SAMPLER_H_

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "server/engine/engine.h"
#include "server/metrics/history.h"
#include "server/metrics/metrics.h"

namespace lossd::metrics {

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
  // Those of the windows, the oldest first; the first one is where the window begins.
  std::deque<Reading> readings_ ABSL_GUARDED_BY(mutex_);
  std::deque<LatencyReading> latencies_ ABSL_GUARDED_BY(mutex_);

  absl::Mutex stop_mutex_;
  bool stop_ ABSL_GUARDED_BY(stop_mutex_) = false;
  std::thread thread_;
};

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_SAMPLER_H_
