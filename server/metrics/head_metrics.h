// SPDX-License-Identifier: Apache-2.0
// The metrics of each head. HeadMetrics counts a head's rows and keeps its last steps as a trainer would plot
// them. SaveMetrics counts saved checkpoints and keeps the last saves of a head.
//
// Both classes are thread-safe.
#ifndef LOSSD_SERVER_METRICS_HEAD_METRICS_H_
#define LOSSD_SERVER_METRICS_HEAD_METRICS_H_

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
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"
#include "server/engine/engine_options.h"

namespace lossd::metrics {

// Rows and steps of each head. The series of a head begin with its first chunk or step and end with the head,
// so their number is bounded by the number of heads. The last kSteps steps of a head take 4 KiB.
class HeadMetrics {
 public:
  static constexpr size_t kSteps = 32;  // of each head are kept

  // A closed step.
  struct Step {
    uint64_t number = 0;
    absl::Time closed;
    std::optional<double> seconds;  // since the one before it was closed
    std::optional<double> loss;     // none: no rows
    // Predicted relative error of its sampled gradients; none: no chunk of it was sampled.
    std::optional<double> gradient_error;
    // Probability left out of its filtered gradients, mean of their rows; none: none were filtered.
    std::optional<double> dropped_probability;
    double grad_norm = 0.0;
    double learning_rate = 0.0;
    int64_t rows = 0;
    bool skipped = false;  // without an update
  };
  // A head at one moment.
  struct Summary {
    int64_t rows = 0;  // computed since the head's series began
    std::optional<Step> last;
  };

  explicit HeadMetrics(absl::AnyInvocable<absl::Time() const> now = &clocks::SteadyNow)
      : now_(std::move(now)) {}

  void OnChunk(const engine::ChunkReport& report) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnChunkLeft(const engine::ChunkReport& report) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnStep(const engine::StepReport& report) ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends the head's series.
  void Forget(absl::string_view head) ABSL_LOCKS_EXCLUDED(mutex_);
  std::map<std::string, Summary> Summaries() const ABSL_LOCKS_EXCLUDED(mutex_);
  // The last steps of a head, the newest first.
  std::vector<Step> Steps(absl::string_view head) const ABSL_LOCKS_EXCLUDED(mutex_);
  // Rows of all heads, also of heads that were deleted.
  int64_t total_rows() const ABSL_LOCKS_EXCLUDED(mutex_);
  void Collect(std::vector<prometheus::MetricFamily>* families) const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // Sums over the chunks of a step that is not closed yet, as in engine::ChunkReport.
  struct OpenStep {
    double loss_sum = 0.0;
    int64_t loss_rows = 0;
    double sampling_variance = 0.0;
    double squared_gradient = 0.0;
    double dropped_mass = 0.0;
    int64_t filtered_rows = 0;
  };
  struct Head {
    int64_t rows = 0;
    int64_t valid_rows = 0;
    double device_seconds = 0.0;
    OpenStep open;
    std::deque<Step> steps;  // the newest first
  };

  Head& At(absl::string_view head) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const absl::AnyInvocable<absl::Time() const> now_;
  mutable absl::Mutex mutex_;
  std::map<std::string, Head, std::less<>> heads_ ABSL_GUARDED_BY(mutex_);
  int64_t rows_of_gone_heads_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Time busy_until_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();  // as far as it is counted
};

// Metrics of saved checkpoints.
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

#endif  // LOSSD_SERVER_METRICS_HEAD_METRICS_H_
