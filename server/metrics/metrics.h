// SPDX-License-Identifier: Apache-2.0
// Metrics holds everything the server counts and measures, in Prometheus's terms. There is one object per
// server.
//
// The parts that do the work push counters and histograms. What the engine, the backend and the process know
// anyway (memory, queues, streams) is pulled when metrics are collected.
//
// Label cardinality is bounded: `head` by the heads that exist (a head's series ends with it), `method`
// and `code` by the protocol, `gradients` is exact, filtered or sampled.
//
// Thread-safe.
#ifndef LOSSD_SERVER_METRICS_METRICS_H_
#define LOSSD_SERVER_METRICS_METRICS_H_

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/metric_family.h>
#include <prometheus/registry.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "kernels/backend.h"
#include "server/access/certificates.h"
#include "server/engine/engine.h"
#include "server/metrics/event_log.h"
#include "server/metrics/families.h"
#include "server/metrics/gpu_monitor.h"
#include "server/metrics/head_metrics.h"
#include "server/metrics/rank_metrics.h"
#include "server/metrics/trace_recorder.h"

namespace lossd::metrics {

// Labels of lossd_build_info.
struct BuildInfo {
  std::string version;
  std::string backend;  // "cpu" or "cuda"
  std::string device;
  std::string compiler;
};

enum class Phase : uint8_t {
  kReceive,  // a slice's message has arrived -> its rows are in a staging buffer and with the engine
  kQueue,    // with the engine -> its chunk is formed
  kCompute,  // chunk formed -> results ready
  kSend,     // results ready -> taken by the transport
};
inline constexpr size_t kPhases = 4;
absl::string_view Name(Phase phase);

// The latencies of microbatches and of each phase, in this order, in seconds, since the start.
inline constexpr size_t kLatencies = 1 + kPhases;
using Latencies = std::array<prometheus::ClientMetric::Histogram, kLatencies>;

// Totals for the status page.
struct Totals {
  double rows = 0.0;
  double payload_bytes_in = 0.0;
  double payload_bytes_out = 0.0;
  double steps = 0.0;
  double errors = 0.0;
};

class Metrics final : public engine::EngineObserver {
 public:
  explicit Metrics(const BuildInfo& build);
  ~Metrics() override;
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // From now until Detach, pulled metrics come from these.
  void Attach(const engine::Engine* engine, const kernels::Backend* backend, ReadRanks ranks = nullptr,
              ReadSharedMemory shared_memory = nullptr) ABSL_LOCKS_EXCLUDED(sources_mutex_);
  // After this returns none of them is used any more.
  void Detach() ABSL_LOCKS_EXCLUDED(sources_mutex_);
  // From now on the metrics of these GPUs are exported too, instead of those before; of several ranks, those
  // of the first ranks, in order. Null: one without metrics.
  void AttachGpus(std::vector<const GpuMonitor*> gpus) ABSL_LOCKS_EXCLUDED(sources_mutex_);
  // From now on its expiry is exported; null: none is. It outlives this, or the next call.
  void AttachTls(access::ReloadedTls* tls) ABSL_LOCKS_EXCLUDED(sources_mutex_);
  void SetDraining(bool draining) ABSL_LOCKS_EXCLUDED(sources_mutex_);

  void ObservePhase(Phase phase, double seconds);
  void ObserveMicrobatch(double seconds) { microbatch_seconds_.Observe(seconds); }
  void AddPayloadIn(int64_t bytes) { payload_in_.Increment(static_cast<double>(bytes)); }
  void AddPayloadOut(int64_t bytes) { payload_out_.Increment(static_cast<double>(bytes)); }
  void CountRequest(absl::string_view method);
  // `code` as the protocol spells it, e.g. "INVALID_ARGUMENT".
  void CountError(absl::string_view method, absl::string_view code);
  // A limit was reached: something was refused, or ended. `flag` sets it, e.g. "max_streams".
  void CountLimit(absl::string_view flag);
  SaveMetrics& saves() { return saves_; }
  EventLog& events() { return event_log_; }
  TraceRecorder& trace() { return trace_; }
  const HeadMetrics& heads() const { return heads_; }
  // Ends the head's series.
  void ForgetHead(absl::string_view head);

  // engine::EngineObserver
  void OnChunk(const engine::ChunkReport& report) override;
  void OnChunkLeft(const engine::ChunkReport& report) override;
  void OnChoices(const engine::ChoicesReport& report) override;
  void OnContribution(const engine::ContributionReport& report) override;
  void OnStep(const engine::StepReport& report) override;
  void OnDeviceError(const absl::Status& status) override;

  std::vector<prometheus::MetricFamily> Collect() const ABSL_LOCKS_EXCLUDED(sources_mutex_);
  // Prometheus text exposition format 0.0.4.
  std::string RenderText() const;

  Totals totals() const;
  Latencies latencies() const;

 private:
  void CollectEngine(std::vector<prometheus::MetricFamily>* families) const
      ABSL_SHARED_LOCKS_REQUIRED(sources_mutex_);

  // What reports of the engine add to; in metrics.cc.
  struct EngineSeries;

  prometheus::Registry registry_;
  // Owned by registry_.
  prometheus::Family<prometheus::Histogram>& phase_family_;
  prometheus::Histogram* phase_seconds_[kPhases];
  prometheus::Histogram& microbatch_seconds_;
  const std::unique_ptr<EngineSeries> events_;
  prometheus::Family<prometheus::Counter>& payload_family_;
  prometheus::Counter& payload_in_;
  prometheus::Counter& payload_out_;
  prometheus::Family<prometheus::Counter>& requests_;
  prometheus::Family<prometheus::Counter>& errors_;
  prometheus::Family<prometheus::Counter>& limits_;
  SaveMetrics saves_;
  HeadMetrics heads_;
  EventLog event_log_;
  TraceRecorder trace_;

  // Held while the engine is asked; so the observer's members, which the engine calls, do without it.
  mutable absl::Mutex sources_mutex_;
  const engine::Engine* engine_ ABSL_GUARDED_BY(sources_mutex_) = nullptr;
  const kernels::Backend* backend_ ABSL_GUARDED_BY(sources_mutex_) = nullptr;
  ReadRanks ranks_ ABSL_GUARDED_BY(sources_mutex_);
  ReadSharedMemory shared_memory_ ABSL_GUARDED_BY(sources_mutex_);
  std::vector<const GpuMonitor*> gpus_ ABSL_GUARDED_BY(sources_mutex_);
  access::ReloadedTls* tls_ ABSL_GUARDED_BY(sources_mutex_) = nullptr;
  bool draining_ ABSL_GUARDED_BY(sources_mutex_) = false;
};

// The value below which a share `quantile` of the observations lies, interpolated linearly inside the
// bucket it falls in; the last finite bound if it falls beyond. 0 without observations.
double EstimateQuantile(const prometheus::ClientMetric::Histogram& histogram, double quantile);

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_METRICS_H_
