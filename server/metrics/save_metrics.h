// SPDX-License-Identifier: Apache-2.0
// Metrics of saved checkpoints.
//
// Thread-safe.
#ifndef LOSSD_SERVER_METRICS_SAVE_METRICS_H_
#define LOSSD_SERVER_METRICS_SAVE_METRICS_H_

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/metric_family.h>
#include <prometheus/registry.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace lossd::metrics {

class SaveMetrics {
 public:
  // The registry outlives this, and collects what is counted here.
  explicit SaveMetrics(prometheus::Registry& registry);

  static constexpr size_t kSaves = 8;  // of each head are kept

  // A checkpoint that was saved.
  struct Save {
    std::string checkpoint;  // "HEAD/NAME"
    uint64_t step = 0;
    int64_t bytes = 0;
    double seconds = 0.0;  // that it took
    absl::Time time;       // when it was on the disk
  };

  // A checkpoint of the head was saved. `save.time` is set here.
  void OnSaved(absl::string_view head, Save save) ABSL_LOCKS_EXCLUDED(mutex_);
  // Counted as cancelled, as existing (the name is taken, or the same is saved already), or as failed.
  void OnFailed(const absl::Status& status);
  // `count` checkpoints were removed: by `keep`, or by a client's DeleteCheckpoint.
  enum class Cause { kPruned, kDeleted };
  void OnRemoved(Cause cause, size_t count);
  // What the running save has read and not yet written.
  void SetBuffered(int64_t bytes) { buffered_.Set(static_cast<double>(bytes)); }
  // Ends the head's series.
  void ForgetHead(absl::string_view head) ABSL_LOCKS_EXCLUDED(mutex_);
  // The last saves of a head, the newest first.
  std::vector<Save> Saves(absl::string_view head) const ABSL_LOCKS_EXCLUDED(mutex_);
  // Adds the families of each head's last save.
  void Collect(std::vector<prometheus::MetricFamily>* families) const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // Owned by the registry.
  prometheus::Family<prometheus::Counter>& by_result_;
  prometheus::Counter& saved_;
  prometheus::Counter& failed_;
  prometheus::Counter& cancelled_;
  prometheus::Counter& existing_;
  prometheus::Counter& saved_bytes_;
  prometheus::Histogram& seconds_;
  prometheus::Gauge& buffered_;
  prometheus::Family<prometheus::Counter>& removed_;
  prometheus::Counter& pruned_;
  prometheus::Counter& deleted_;

  mutable absl::Mutex mutex_;
  // By head, the newest first.
  std::map<std::string, std::deque<Save>, std::less<>> last_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_SAVE_METRICS_H_
