// SPDX-License-Identifier: Apache-2.0
// The metrics of the server, for Prometheus. The class Metrics, one object per server, has everything that
// the server counts and measures. The file declares its parts first: functions that make metric families,
// GpuMonitor for the metrics of a GPU, HeadMetrics and SaveMetrics for the metrics of heads, and functions
// for the metrics of the ranks of a server.
#ifndef LOSSD_SERVER_METRICS_METRICS_H_
#define LOSSD_SERVER_METRICS_METRICS_H_

#include <prometheus/client_metric.h>
#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/metric_family.h>
#include <prometheus/registry.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/clocks/clock.h"
#include "kernels/rank_link.h"
#include "server/access/certificates.h"
#include "server/engine/engine.h"
#include "server/engine/engine_options.h"
#include "server/metrics/events.h"

namespace lossd::metrics {

// ---- Families ----
// Functions that build metric families. Some build them in a registry; the others build them for values that
// are read when metrics are collected. CollectProcess makes all families of the process, and
// AddSharedMemoryFamilies the families of the memory that clients share with the server. The functions are
// stateless and thread-safe.

using Labels = std::vector<std::pair<std::string, std::string>>;

inline prometheus::MetricFamily MakeFamily(std::string name, std::string help, prometheus::MetricType type) {
  prometheus::MetricFamily family;
  family.name = std::move(name);
  family.help = std::move(help);
  family.type = type;
  return family;
}

// Adds one sample; the family's type says whether it is a counter or a gauge.
inline void AddSample(prometheus::MetricFamily* family, const Labels& labels, double value) {
  prometheus::ClientMetric metric;
  for (const auto& [name, text] : labels) metric.label.push_back({name, text});
  if (family->type == prometheus::MetricType::Counter) {
    metric.counter.value = value;
  } else {
    metric.gauge.value = value;
  }
  family->metric.push_back(std::move(metric));
}

inline prometheus::MetricFamily Single(std::string name, std::string help, prometheus::MetricType type,
                                       double value) {
  prometheus::MetricFamily family = MakeFamily(std::move(name), std::move(help), type);
  AddSample(&family, {}, value);
  return family;
}

// Adds the families `more`. If a family of the same name exists at or after families[begin], adds the samples
// to that family instead.
inline void AddFamilies(std::vector<prometheus::MetricFamily> more, size_t begin,
                        std::vector<prometheus::MetricFamily>* families) {
  for (prometheus::MetricFamily& each : more) {
    const auto same = std::find_if(families->begin() + static_cast<std::ptrdiff_t>(begin), families->end(),
                                   [&](const auto& family) { return family.name == each.name; });
    if (same == families->end()) {
      families->push_back(std::move(each));
    } else {
      std::move(each.metric.begin(), each.metric.end(), std::back_inserter(same->metric));
    }
  }
}

inline prometheus::MetricFamily Gauge(std::string name, std::string help, double value) {
  return Single(std::move(name), std::move(help), prometheus::MetricType::Gauge, value);
}

inline prometheus::Family<prometheus::Counter>& CounterFamily(prometheus::Registry& registry,
                                                              const char* name, const char* help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(registry);
}

inline prometheus::Family<prometheus::Histogram>& HistogramFamily(prometheus::Registry& registry,
                                                                  const char* name, const char* help) {
  return prometheus::BuildHistogram().Name(name).Help(help).Register(registry);
}

// The statistics of this process, from /proc/self.
struct ProcessStats {
  double cpu_seconds = 0.0;         // user and system
  double start_time_seconds = 0.0;  // since the Unix epoch
  int64_t virtual_bytes = 0;
  int64_t resident_bytes = 0;
  int64_t open_fds = 0;
};

// Nullopt if /proc cannot be read.
std::optional<ProcessStats> ReadProcessStats();

// Metrics of this process under the names that Prometheus client libraries share. Empty if /proc cannot be
// read.
std::vector<prometheus::MetricFamily> CollectProcess();

// The memory of one kind that clients of the host share with the server.
struct SharedMemoryUse {
  std::string device;  // "GPU-...", or "host"
  int64_t used_bytes = 0;
  int64_t limit_bytes = 0;
};

// Reads the use of shared memory. Called when metrics are collected.
using ReadSharedMemory = std::function<std::vector<SharedMemoryUse>()>;

void AddSharedMemoryFamilies(const std::vector<SharedMemoryUse>& uses,
                             std::vector<prometheus::MetricFamily>* families);

// ---- A GPU ----
// GpuMonitor watches one GPU through NVML, NVIDIA's management library. It reports power, temperature,
// memory, utilisation, throttling and ECC errors as metrics, and critical errors (Xid) as they happen, so the
// server also notices the loss of an idle device. GpuMonitor and Nvml are thread-safe.

// The part of NVML's interface that the server uses.

inline constexpr char kNvmlLibrary[] = "libnvidia-ml.so.1";

// Return codes.
inline constexpr int kNvmlSuccess = 0;
inline constexpr int kNvmlInsufficientSize = 7;
inline constexpr int kNvmlTimeout = 10;
inline constexpr int kNvmlGpuIsLost = 15;

inline constexpr int kNvmlTemperatureGpu = 0;
inline constexpr int kNvmlCorrected = 0;  // memory error types
inline constexpr int kNvmlUncorrected = 1;
inline constexpr int kNvmlVolatile = 0;  // counts since the driver was loaded
inline constexpr unsigned long long kNvmlEventXid = 0x8;

using NvmlDevice = void*;
using NvmlEventSet = void*;
struct NvmlUtilization {
  unsigned gpu;     // percent
  unsigned memory;  // percent
};
struct NvmlMemory {
  unsigned long long total, free, used;  // bytes
};
struct NvmlEvent {
  NvmlDevice device;
  unsigned long long type;
  unsigned long long data;  // the Xid
  unsigned gpu_instance, compute_instance;
};

// The functions of NVML that the server uses. The library comes with the driver and is loaded at run time, so
// the program also runs on a machine without it. Thread-safe, as NVML is.
class Nvml {
 public:
  // Loads and initializes the library. UNAVAILABLE with the reason if that fails.
  static absl::StatusOr<std::unique_ptr<Nvml>> Load(const std::string& library);
  ~Nvml();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  // OK, or INTERNAL with the name of the call and NVML's words.
  absl::Status ToStatus(int result, absl::string_view call) const;

  int (*device_by_uuid)(const char*, NvmlDevice*) = nullptr;
  int (*power_usage)(NvmlDevice, unsigned* milliwatts) = nullptr;
  int (*temperature)(NvmlDevice, int sensor, unsigned* celsius) = nullptr;
  int (*utilization)(NvmlDevice, NvmlUtilization*) = nullptr;
  int (*memory)(NvmlDevice, NvmlMemory*) = nullptr;
  int (*ecc_errors)(NvmlDevice, int type, int counter, unsigned long long* count) = nullptr;
  int (*throttle_reasons)(NvmlDevice, unsigned long long* bits) = nullptr;
  // Null if the library is too old. If `count` is 0, the function only sets `count` to the number of
  // processes.
  int (*compute_processes)(NvmlDevice, unsigned* count, void* processes) = nullptr;
  int (*event_set_create)(NvmlEventSet*) = nullptr;
  int (*register_events)(NvmlDevice, unsigned long long types, NvmlEventSet) = nullptr;
  int (*event_set_wait)(NvmlEventSet, NvmlEvent*, unsigned timeout_ms) = nullptr;
  int (*event_set_free)(NvmlEventSet) = nullptr;

 private:
  Nvml() = default;
  absl::Status Find();

  void* file_ = nullptr;
  bool initialized_ = false;
  int (*init_)() = nullptr;
  int (*shutdown_)() = nullptr;
  const char* (*error_string_)(int) = nullptr;
};

struct GpuMonitorOptions {
  std::string library = kNvmlLibrary;
  std::string uuid;                            // the GPU's, "GPU-..."
  absl::Duration interval = absl::Seconds(1);  // between samples
  // Both are called on the monitor's thread.
  absl::AnyInvocable<void(uint64_t xid)> on_xid = [](uint64_t) {};
  absl::AnyInvocable<void(const absl::Status&)> on_lost = [](const absl::Status&) {};  // called once
  // Called once, when several programs have a context on the GPU. `processes` is their number, the server
  // included.
  absl::AnyInvocable<void(unsigned processes)> on_shared = [](unsigned) {};
};

// Watches one GPU. A thread of the monitor asks NVML once in `interval` and keeps the answers. So a driver
// that hangs delays neither a scrape nor a probe.
class GpuMonitor {
 public:
  // UNAVAILABLE if NVML cannot be loaded, or does not know the GPU.
  static absl::StatusOr<std::unique_ptr<GpuMonitor>> Start(GpuMonitorOptions options);
  // Waits until the running call of NVML returns.
  ~GpuMonitor();
  GpuMonitor(const GpuMonitor&) = delete;
  GpuMonitor& operator=(const GpuMonitor&) = delete;

  // The last sample as metrics. Values that the GPU does not report are left out.
  std::vector<prometheus::MetricFamily> Collect() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Sample {
    std::optional<unsigned> milliwatts;
    std::optional<unsigned> celsius;
    std::optional<NvmlUtilization> utilization;
    std::optional<NvmlMemory> memory;
    std::optional<unsigned long long> corrected;
    std::optional<unsigned long long> uncorrected;
    std::optional<unsigned long long> throttled;
    std::optional<unsigned> processes;
  };

  GpuMonitor(GpuMonitorOptions options, std::unique_ptr<Nvml> nvml);
  absl::Status Open();
  void Loop() ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits for one interval, or until a critical error comes.
  void AwaitEvent() ABSL_LOCKS_EXCLUDED(mutex_);
  void TakeSample() ABSL_LOCKS_EXCLUDED(mutex_);
  // The number of programs on the GPU that NVML shows to this process.
  std::optional<unsigned> CountProcesses();
  // Waits. Returns true if the monitor stops.
  bool Pause(absl::Duration duration) ABSL_LOCKS_EXCLUDED(mutex_);
  // Handles the result of a call of NVML; true if the call gave a value.
  bool Succeeded(int result);

  GpuMonitorOptions options_;
  const std::unique_ptr<Nvml> nvml_;
  NvmlDevice device_ = nullptr;
  NvmlEventSet events_ = nullptr;  // null: the GPU reports no events
  bool lost_ = false;              // used only by the thread
  bool shared_ = false;            // used only by the thread: on_shared was called

  mutable absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Sample sample_ ABSL_GUARDED_BY(mutex_);
  int64_t xids_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t last_xid_ ABSL_GUARDED_BY(mutex_) = 0;
  std::thread thread_;
};

// ---- Heads and saves ----
// HeadMetrics counts the rows of each head and keeps the head's last steps, with the values that a trainer
// would plot. SaveMetrics counts saved checkpoints and keeps the last saves of a head. Both classes are
// thread-safe.

// Rows and steps of each head. The series of a head begin with the head's first chunk or step and end when
// the head is deleted, so the number of heads bounds the number of series. The last kSteps steps of a head
// take 4 KiB.
class HeadMetrics {
 public:
  static constexpr size_t kSteps = 32;  // the steps kept for each head

  // A closed step.
  struct Step {
    uint64_t number = 0;
    absl::Time closed;
    std::optional<double> seconds;  // since the previous step was closed
    std::optional<double> loss;     // nullopt: the step had no rows
    // The predicted relative error of sampled gradients; nullopt: no chunk of the step was sampled.
    std::optional<double> gradient_error;
    // The probability that filtered gradients left out, averaged over their rows; nullopt: no chunk was
    // filtered.
    std::optional<double> dropped_probability;
    double grad_norm = 0.0;
    double learning_rate = 0.0;
    int64_t rows = 0;
    bool skipped = false;  // the step was closed without an update
  };
  // The state of a head at one moment.
  struct Summary {
    int64_t rows = 0;  // computed since the head's series began
    // Exact, filtered or sampled: how the gradients of the last chunk that took part in a step were computed,
    // or of the last chunk if none has taken part in a step. nullopt: there was no chunk.
    std::optional<kernels::Gradients> gradients;
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
  // The summary of one head; empty if the head has no series.
  Summary SummaryOf(absl::string_view head) const ABSL_LOCKS_EXCLUDED(mutex_);
  // The last steps of a head, the newest first.
  std::vector<Step> Steps(absl::string_view head) const ABSL_LOCKS_EXCLUDED(mutex_);
  // The rows of all heads, including heads that were deleted.
  int64_t total_rows() const ABSL_LOCKS_EXCLUDED(mutex_);
  void Collect(std::vector<prometheus::MetricFamily>* families) const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // Sums over the chunks of the open step, as in engine::ChunkReport.
  struct OpenStep {
    kernels::LossSums sums;
    kernels::LossSums accumulating;
    int64_t filtered_rows = 0;  // valid rows of filtered chunks
  };
  struct Head {
    int64_t rows = 0;
    int64_t valid_rows = 0;
    double device_seconds = 0.0;
    std::optional<kernels::Gradients> gradients;  // see Summary::gradients
    bool takes_part = false;                      // a chunk of the head has taken part in a step
    OpenStep open;
    std::deque<Step> steps;  // the newest first
  };

  static Summary SummaryOf(const Head& head);
  Head& At(absl::string_view head) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const absl::AnyInvocable<absl::Time() const> now_;
  mutable absl::Mutex mutex_;
  std::map<std::string, Head, std::less<>> heads_ ABSL_GUARDED_BY(mutex_);
  int64_t rows_of_gone_heads_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Time busy_until_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();  // device time is counted until here
};

// Adds the families for heads that live in host memory: how often they were copied to the device and evicted.
// Other heads have no series.
void CollectPaging(absl::Span<const engine::HeadSnapshot> heads,
                   std::vector<prometheus::MetricFamily>* families);

// Counts saved checkpoints, and keeps the last saves of each head.
class SaveMetrics {
 public:
  // The registry outlives the object and owns its counters.
  explicit SaveMetrics(prometheus::Registry& registry);

  static constexpr size_t kSaves = 8;  // the saves kept for each head

  // A checkpoint that was saved.
  struct Save {
    std::string checkpoint;  // "HEAD/NAME"
    uint64_t step = 0;
    int64_t bytes = 0;
    double seconds = 0.0;  // how long the save took
    absl::Time time;       // when the save was complete on the disk
  };

  // Call when a checkpoint of the head was saved. OnSaved sets `save.time`.
  void OnSaved(absl::string_view head, Save save) ABSL_LOCKS_EXCLUDED(mutex_);
  // Call when a save has not succeeded. The save is counted as cancelled, as existing (the name is taken, or
  // the same checkpoint is already saved), or as failed.
  void OnFailed(const absl::Status& status);
  // Why checkpoints were removed: by `keep` (kPruned), or by a client's DeleteCheckpoint (kDeleted).
  enum class Cause { kPruned, kDeleted };
  void OnRemoved(Cause cause, size_t count);
  // Sets the bytes that the running save has read and not yet written.
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
  // The last saves by head, the newest first.
  std::map<std::string, std::deque<Save>, std::less<>> last_ ABSL_GUARDED_BY(mutex_);
};

// ---- Ranks ----
// AddRankFamilies makes the metrics of the ranks (processes or devices) of a server: which ranks exist, and
// which memory each rank uses. A worker, a rank that serves no clients, sends its own metrics to rank 0 as
// PlainFamily. The functions are stateless and thread-safe.

// The state and the metrics of one rank.
struct RankReading {
  kernels::RankState state;
  std::vector<prometheus::MetricFamily> metrics;  // sent by the rank, without the label rank
};

// Returns the readings of all ranks, in the order of ranks. Thread-safe.
using ReadRanks = std::function<std::vector<RankReading>()>;

// Adds the families of all ranks. Families of one name from several ranks become one family, with the label
// rank.
void AddRankFamilies(std::vector<RankReading> ranks, std::vector<prometheus::MetricFamily>* families);

// The families with the times that a rank has spent on each kind of work, without the label rank.
std::vector<prometheus::MetricFamily> RankTimeFamilies(const kernels::RankTimes& times);

// Adds the label rank to every sample, before its other labels.
void AddRankLabel(int rank, std::vector<prometheus::MetricFamily>* families);

// A family of counters or gauges, in a form that can be sent.
struct PlainFamily {
  struct Sample {
    std::vector<std::pair<std::string, std::string>> labels;
    double value = 0.0;
  };
  std::string name;
  std::string help;
  bool counter = false;  // false: a gauge
  std::vector<Sample> samples;
};

// The families of a worker: the times of its work, and the metrics of its GPUs. A null monitor stands for a
// GPU without metrics.
std::vector<PlainFamily> WorkerFamilies(const kernels::RankTimes& times,
                                        absl::Span<const std::unique_ptr<GpuMonitor>> gpus);

std::vector<PlainFamily> ToPlain(const std::vector<prometheus::MetricFamily>& families);
std::vector<prometheus::MetricFamily> FromPlain(const std::vector<PlainFamily>& families);

// ---- The server ----

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

// Histograms of latencies since the start, in seconds: the first one of microbatches, then one for each
// phase.
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

// Metrics has everything that the server counts and measures. There is one object per server.
//
// Counters and histograms are pushed by the parts of the server that do the work. Values that the engine, the
// backend and the process keep for themselves (memory, queues, streams) are read when metrics are collected.
//
// Label cardinality is bounded: `head` by the heads that exist (a head's series ends with it), `method`
// and `code` by the protocol, `gradients` is exact, filtered or sampled.
//
// Thread-safe.
class Metrics final : public engine::EngineObserver {
 public:
  explicit Metrics(const BuildInfo& build);
  ~Metrics() override;
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // Sets the objects from which metrics are read at collection, until Detach.
  void Attach(const engine::Engine* engine, const kernels::Backend* backend, ReadRanks ranks = nullptr,
              ReadSharedMemory shared_memory = nullptr) ABSL_LOCKS_EXCLUDED(sources_mutex_);
  // After this returns, the objects given to Attach are not used any more.
  void Detach() ABSL_LOCKS_EXCLUDED(sources_mutex_);
  // Exports the metrics of these GPUs from now on, in place of the GPUs of an earlier call. If the server has
  // several ranks, these are the GPUs of the first ranks, in order. Null stands for a GPU without metrics.
  void AttachGpus(std::vector<const GpuMonitor*> gpus) ABSL_LOCKS_EXCLUDED(sources_mutex_);
  // Exports the expiry time of this certificate from now on; null: there is no certificate. `tls` outlives
  // the object, or lives until the next call.
  void AttachTls(access::ReloadedTls* tls) ABSL_LOCKS_EXCLUDED(sources_mutex_);
  void SetDraining(bool draining) ABSL_LOCKS_EXCLUDED(sources_mutex_);

  void ObservePhase(Phase phase, double seconds);
  void ObserveMicrobatch(double seconds) { microbatch_seconds_.Observe(seconds); }
  void AddPayloadIn(int64_t bytes) { payload_in_.Increment(static_cast<double>(bytes)); }
  void AddPayloadOut(int64_t bytes) { payload_out_.Increment(static_cast<double>(bytes)); }
  void CountRequest(absl::string_view method);
  // `code` as the protocol spells it, e.g. "INVALID_ARGUMENT".
  void CountError(absl::string_view method, absl::string_view code);
  // Counts that a limit was reached, so that a request was refused or ended. `flag`: the flag that sets the
  // limit, e.g. "max_streams".
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

  // The series that the engine's reports add to; defined in metrics.cc.
  struct EngineSeries;

  prometheus::Registry registry_;
  // Owned by registry_.
  prometheus::Family<prometheus::Histogram>& phase_family_;
  prometheus::Histogram* phase_seconds_[kPhases];
  prometheus::Histogram& microbatch_seconds_;
  const std::unique_ptr<EngineSeries> engine_series_;
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

  // Held while Collect calls the engine. So the member functions of EngineObserver, which the engine calls,
  // must not lock it.
  mutable absl::Mutex sources_mutex_;
  const engine::Engine* engine_ ABSL_GUARDED_BY(sources_mutex_) = nullptr;
  const kernels::Backend* backend_ ABSL_GUARDED_BY(sources_mutex_) = nullptr;
  ReadRanks ranks_ ABSL_GUARDED_BY(sources_mutex_);
  ReadSharedMemory shared_memory_ ABSL_GUARDED_BY(sources_mutex_);
  std::vector<const GpuMonitor*> gpus_ ABSL_GUARDED_BY(sources_mutex_);
  access::ReloadedTls* tls_ ABSL_GUARDED_BY(sources_mutex_) = nullptr;
  bool draining_ ABSL_GUARDED_BY(sources_mutex_) = false;
};

// Estimates a quantile of a histogram: the value below which the share `quantile` of the observations lies.
// Interpolates linearly inside a bucket. If the quantile is in the last, unbounded bucket, returns the last
// finite bound. Without observations returns 0.
double EstimateQuantile(const prometheus::ClientMetric::Histogram& histogram, double quantile);

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_METRICS_H_
