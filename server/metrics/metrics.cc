// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/metrics.h"

#include <prometheus/gauge.h>
#include <prometheus/text_serializer.h>

#include <atomic>
#include <cmath>
#include <iterator>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/clocks/clock.h"
#include "server/metrics/families.h"

namespace lossd::metrics {
namespace {

using kernels::Gradients;
using prometheus::MetricFamily;
using prometheus::MetricType;

prometheus::Histogram::BucketBoundaries LatencyBuckets() {
  return {1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0};
}

prometheus::Histogram::BucketBoundaries RowBuckets() { return {1, 4, 16, 64, 256, 1024, 4096, 16384, 65536}; }

prometheus::Histogram::BucketBoundaries ErrorBuckets() {
  return {1e-3, 2e-3, 3e-3, 5e-3, 7e-3, 1e-2, 1.5e-2, 2e-2, 3e-2, 5e-2, 0.1, 0.2, 0.5, 1.0};
}

prometheus::Labels GradientsLabel(Gradients gradients) {
  return {{"gradients", std::string(kernels::Name(gradients))}};
}

MetricFamily ByKind(std::string name, std::string help, const kernels::MemoryBytes& bytes) {
  MetricFamily family = MakeFamily(std::move(name), std::move(help), MetricType::Gauge);
  for (size_t i = 0; i < kernels::kMemoryKinds; ++i) {
    AddSample(&family, {{"kind", std::string(kernels::Name(static_cast<kernels::MemoryKind>(i)))}},
              static_cast<double>(bytes.by_kind[i]));
  }
  return family;
}

// The level of the event of a call that ended with the code. A client that cancels a call knows about it; the
// operator has to look at INTERNAL and DATA_LOSS.
EventLevel LevelOf(absl::string_view code) {
  if (code == "CANCELLED") return EventLevel::kInfo;
  return code == "INTERNAL" || code == "DATA_LOSS" ? EventLevel::kError : EventLevel::kWarning;
}

// The spans of a chunk that leaves the device now, and of its slices.
void TraceChunk(const engine::ChunkReport& report, TraceRecorder* trace) {
  static std::atomic<uint64_t> number{0};  // tells chunks of all heads apart
  const absl::Time left = clocks::SteadyNow();
  const absl::Time formed = left - absl::Seconds(report.device_seconds);
  const absl::Time ready = formed + absl::Seconds(report.compute_seconds);
  for (size_t i = 0; i < report.slices.size(); ++i) {
    const engine::SliceReport& slice = report.slices[i];
    Span span{.id = slice.microbatch_id, .first_row = slice.first_row, .rows = slice.rows};
    const auto add = [&](SpanKind kind, absl::Time begin, absl::Time end) {
      span.kind = kind;
      span.begin = begin;
      span.end = end;
      trace->Add(report.head, span);
    };
    add(SpanKind::kQueue, formed - absl::Seconds(report.queue_seconds[i]), formed);
    add(SpanKind::kCompute, formed, ready);
  }
  const uint64_t id = ++number;
  trace->Add(report.head,
             {.kind = SpanKind::kResults, .id = id, .rows = report.rows, .begin = formed, .end = ready});
  trace->Add(report.head,
             {.kind = SpanKind::kWeightGradient, .id = id, .rows = report.rows, .begin = ready, .end = left});
}

void CollectMemory(const kernels::Backend& backend, std::vector<MetricFamily>* families) {
  const kernels::MemoryStats memory = backend.memory();
  families->push_back(ByKind("lossd_memory_bytes", "Planned memory held, by purpose.", memory.current));
  families->push_back(ByKind("lossd_memory_peak_bytes",
                             "Most planned memory held since the start, by purpose (each its own peak).",
                             memory.peak));
  families->push_back(Gauge("lossd_memory_limit_bytes", "Memory the plan may reach; 0: no limit.",
                            static_cast<double>(memory.limit)));
}

}  // namespace

absl::string_view Name(Phase phase) {
  constexpr absl::string_view kNames[kPhases] = {"receive", "queue", "compute", "send"};
  return kNames[static_cast<size_t>(phase)];
}

// One member for each series, with its name and help; the registry owns the series.
struct Metrics::EngineSeries {
  explicit EngineSeries(prometheus::Registry& registry_of_all) : registry(registry_of_all) {}

  prometheus::Registry& registry;
  prometheus::Family<prometheus::Histogram>& chunk_rows =
      HistogramFamily(registry, "lossd_chunk_rows",
                      "Valid rows computed together in one chunk, by how its gradients were computed: exact "
                      "(also if it has none, and if a filter or sampling was given up), filtered, sampled.");
  prometheus::Histogram& exact_chunk_rows = chunk_rows.Add(GradientsLabel(Gradients::kExact), RowBuckets());
  prometheus::Histogram& filtered_chunk_rows =
      chunk_rows.Add(GradientsLabel(Gradients::kFiltered), RowBuckets());
  prometheus::Histogram& sampled_chunk_rows =
      chunk_rows.Add(GradientsLabel(Gradients::kSampled), RowBuckets());
  prometheus::Family<prometheus::Counter>& chunks =
      CounterFamily(registry, "lossd_chunks_total",
                    "Chunks computed, by how their gradients were: exact, filtered, sampled.");
  prometheus::Counter& exact_chunks = chunks.Add(GradientsLabel(Gradients::kExact));
  prometheus::Counter& filtered_chunks = chunks.Add(GradientsLabel(Gradients::kFiltered));
  prometheus::Counter& sampled_chunks = chunks.Add(GradientsLabel(Gradients::kSampled));
  prometheus::Histogram& gradient_error =
      HistogramFamily(
          registry, "lossd_gradient_error_ratio",
          "Predicted relative error of the gradients of a chunk, of chunks with sampled gradients.")
          .Add({}, ErrorBuckets());
  prometheus::Counter& dropped_mass =
      CounterFamily(registry, "lossd_dropped_probability_total",
                    "Probability left out of filtered gradients, summed over rows; divided by "
                    "lossd_chunk_rows_sum of filtered chunks it is the mean per valid row.")
          .Add({});
  prometheus::Counter& steps =
      CounterFamily(registry, "lossd_steps_total", "Optimizer steps closed, over all heads.").Add({});
  prometheus::Counter& skipped_steps =
      CounterFamily(registry, "lossd_skipped_steps_total",
                    "Of them, steps without an update because of a non-finite gradient.")
          .Add({});
  prometheus::Counter& diverged_steps =
      CounterFamily(
          registry, "lossd_diverged_steps_total",
          "Steps after which weights or moments were infinite or NaN; they are not counted as closed.")
          .Add({});
  prometheus::Counter& contribution_rows =
      CounterFamily(registry, "lossd_contribution_rows_total",
                    "Rows added to gradients by AddGradient, over all heads.")
          .Add({});
  prometheus::Counter& device_errors =
      CounterFamily(registry, "lossd_device_errors_total", "Operations that failed on the device.").Add({});
  prometheus::Gauge& device_lost =
      prometheus::BuildGauge()
          .Name("lossd_device_lost")
          .Help("1 once the device is lost: every call that needs it fails, else 0.")
          .Register(registry)
          .Add({});

  // Of chunks whose gradients were computed so.
  prometheus::Counter& Chunks(Gradients gradients) const {
    if (gradients == Gradients::kSampled) return sampled_chunks;
    return gradients == Gradients::kFiltered ? filtered_chunks : exact_chunks;
  }
  prometheus::Histogram& ChunkRows(Gradients gradients) const {
    if (gradients == Gradients::kSampled) return sampled_chunk_rows;
    return gradients == Gradients::kFiltered ? filtered_chunk_rows : exact_chunk_rows;
  }
};

Metrics::Metrics(const BuildInfo& build)
    : phase_family_(
          HistogramFamily(registry_, "lossd_phase_seconds",
                          "Time a slice spends in each phase: receive (arrived until queued), queue "
                          "(until its chunk is formed), compute (until results are ready), send (until "
                          "taken by the transport).")),
      microbatch_seconds_(
          HistogramFamily(registry_, "lossd_microbatch_seconds",
                          "Time from the opening message of a ComputeLoss call to its summary.")
              .Add({}, LatencyBuckets())),
      events_(std::make_unique<EngineSeries>(registry_)),
      payload_family_(CounterFamily(registry_, "lossd_payload_bytes_total",
                                    "Tensor bytes of slices received (in) and sent (out).")),
      payload_in_(payload_family_.Add({{"direction", "in"}})),
      payload_out_(payload_family_.Add({{"direction", "out"}})),
      requests_(CounterFamily(registry_, "lossd_requests_total", "Calls received, by method.")),
      errors_(
          CounterFamily(registry_, "lossd_errors_total", "Calls ended with an error, by method and code.")),
      limits_(CounterFamily(registry_, "lossd_limits_reached_total",
                            "Calls and connections that a limit refused or ended, by the limit's flag.")),
      saves_(registry_) {
  for (size_t i = 0; i < kPhases; ++i) {
    phase_seconds_[i] =
        &phase_family_.Add({{"phase", std::string(Name(static_cast<Phase>(i)))}}, LatencyBuckets());
  }
  prometheus::BuildGauge()
      .Name("lossd_build_info")
      .Help("Always 1; the labels say what is running.")
      .Register(registry_)
      .Add({{"version", build.version},
            {"backend", build.backend},
            {"device", build.device},
            {"compiler", build.compiler}})
      .Set(1);
}

Metrics::~Metrics() = default;

void Metrics::Attach(const engine::Engine* engine, const kernels::Backend* backend, ReadRanks ranks,
                     ReadSharedMemory shared_memory) {
  absl::MutexLock lock(&sources_mutex_);
  ranks_ = std::move(ranks);
  shared_memory_ = std::move(shared_memory);
  engine_ = engine;
  backend_ = backend;
}

void Metrics::Detach() { Attach(nullptr, nullptr); }

void Metrics::AttachGpus(std::vector<const GpuMonitor*> gpus) {
  absl::MutexLock lock(&sources_mutex_);
  gpus_ = std::move(gpus);
}

void Metrics::AttachTls(access::ReloadedTls* tls) {
  absl::MutexLock lock(&sources_mutex_);
  tls_ = tls;
}

void Metrics::SetDraining(bool draining) {
  if (draining) event_log_.Add(EventLevel::kWarning, "draining", "", "the server drains");
  absl::MutexLock lock(&sources_mutex_);
  draining_ = draining;
}

void Metrics::ObservePhase(Phase phase, double seconds) {
  phase_seconds_[static_cast<size_t>(phase)]->Observe(seconds);
}

void Metrics::CountRequest(absl::string_view method) {
  requests_.Add({{"method", std::string(method)}}).Increment();
}

void Metrics::CountError(absl::string_view method, absl::string_view code) {
  errors_.Add({{"method", std::string(method)}, {"code", std::string(code)}}).Increment();
  event_log_.Count(LevelOf(code), "call_failed", "", absl::StrCat(method, " ended with ", code));
}

void Metrics::CountLimit(absl::string_view flag) {
  limits_.Add({{"limit", std::string(flag)}}).Increment();
  event_log_.Count(EventLevel::kWarning, "limit_reached", "", absl::StrCat("--", flag, " was reached"));
}

void Metrics::ForgetHead(absl::string_view head) {
  saves_.ForgetHead(head);
  heads_.Forget(head);
}

void Metrics::OnChunk(const engine::ChunkReport& report) {
  events_->Chunks(report.gradients).Increment();
  events_->ChunkRows(report.gradients).Observe(static_cast<double>(report.valid_rows));
  if (report.gradients == Gradients::kSampled) events_->gradient_error.Observe(report.gradient_error());
  events_->dropped_mass.Increment(report.dropped_mass);
  for (const double seconds : report.queue_seconds) {
    ObservePhase(Phase::kQueue, seconds);
    ObservePhase(Phase::kCompute, report.compute_seconds);
  }
  heads_.OnChunk(report);
}

void Metrics::OnChunkLeft(const engine::ChunkReport& report) {
  heads_.OnChunkLeft(report);
  if (trace_.recording()) TraceChunk(report, &trace_);
}

// The choices are for the log.
void Metrics::OnChoices(const engine::ChoicesReport&) {}

void Metrics::OnContribution(const engine::ContributionReport& report) {
  events_->contribution_rows.Increment(static_cast<double>(report.added_rows));
}

void Metrics::OnStep(const engine::StepReport& report) {
  if (report.made_not_finite > 0) {
    events_->diverged_steps.Increment();
    return event_log_.Count(EventLevel::kError, "weights_not_finite", report.head,
                            "a step made weights or moments infinite or NaN; the head is not usable now");
  }
  events_->steps.Increment();
  if (report.skipped) {
    events_->skipped_steps.Increment();
    event_log_.Count(EventLevel::kWarning, "step_skipped", report.head,
                     "a step was closed without an update: its gradients were not finite");
  }
  heads_.OnStep(report);
  const absl::Time now = clocks::SteadyNow();
  trace_.Add(report.head,
             {.kind = SpanKind::kStep, .id = report.step, .rows = report.rows, .begin = now, .end = now});
}

void Metrics::OnDeviceError(const absl::Status& status) {
  events_->device_errors.Increment();
  const bool lost = absl::IsUnavailable(status);
  if (lost) events_->device_lost.Set(1);
  event_log_.Count(EventLevel::kError, lost ? "device_lost" : "device_error", "", status.message());
}

std::vector<MetricFamily> Metrics::Collect() const {
  std::vector<MetricFamily> families = registry_.Collect();
  heads_.Collect(&families);
  saves_.Collect(&families);
  {
    absl::ReaderMutexLock lock(&sources_mutex_);
    families.push_back(Gauge("lossd_draining", "1 while the server is draining, else 0.", draining_ ? 1 : 0));
    if (tls_ != nullptr) {
      families.push_back(
          Gauge("lossd_certificate_expiry_timestamp_seconds",
                "When the first certificate of --tls_cert or --tls_client_ca is no longer valid.",
                absl::ToDoubleSeconds(tls_->Get()->expires - absl::UnixEpoch())));
    }
    if (engine_ != nullptr) CollectEngine(&families);
    if (backend_ != nullptr) CollectMemory(*backend_, &families);
    if (shared_memory_) AddSharedMemoryFamilies(shared_memory_(), &families);
    const size_t of_server = families.size();
    if (ranks_) AddRankFamilies(ranks_(), &families);
    const bool several = families.size() > of_server;  // ranks, of which the first are this process's
    for (size_t i = 0; i < gpus_.size(); ++i) {
      if (gpus_[i] == nullptr) continue;
      std::vector<MetricFamily> own = gpus_[i]->Collect();
      if (several) AddRankLabel(static_cast<int>(i), &own);
      AddFamilies(std::move(own), of_server, &families);
    }
  }
  std::vector<MetricFamily> process = CollectProcess();
  families.insert(families.end(), std::make_move_iterator(process.begin()),
                  std::make_move_iterator(process.end()));
  return families;
}

std::string Metrics::RenderText() const {
  std::ostringstream out;
  prometheus::TextSerializer().Serialize(out, Collect());
  return out.str();
}

void Metrics::CollectEngine(std::vector<MetricFamily>* families) const {
  const engine::EngineStats stats = engine_->stats();
  const auto gauge = [&](const char* name, const char* help, int64_t value) {
    families->push_back(Gauge(name, help, static_cast<double>(value)));
  };
  gauge("lossd_heads", "Heads on the server.", stats.heads);
  gauge("lossd_open_streams", "ComputeLoss calls that are open.", stats.open_streams);
  gauge("lossd_queued_slices", "Slices waiting for the device.", stats.queued_slices);
  gauge("lossd_waiting_slices", "Deterministic mode: slices waiting for their turn to be received.",
        stats.waiting_slices);
  gauge("lossd_queued_rows", "Rows waiting for the device.", stats.queued_rows);
  gauge("lossd_retained_microbatches", "Deferred microbatches whose hidden states are kept.",
        stats.retained_microbatches);
  gauge("lossd_retained_used_bytes", "Part of the retained memory that is in use.",
        stats.retained_bytes_used);
  gauge("lossd_ledger_rows", "Rows remembered in open steps, over all heads.", stats.ledger_rows);
  gauge("lossd_ledger_bytes", "Memory of the record of rows in open steps.", stats.ledger_bytes);
  gauge("lossd_staging_bytes", "Memory that slices are received into and sent from.", stats.staging_bytes);
  gauge("lossd_staging_used_bytes", "Part of the staging memory that is in use.", stats.staging_used_bytes);
  gauge("lossd_staging_peak_bytes", "Most of the staging memory in use at once since the start.",
        stats.staging_peak_bytes);
  MetricFamily busy =
      MakeFamily("lossd_device_busy_seconds_total",
                 "Time in which the device thread worked or a chunk was on the device.", MetricType::Counter);
  AddSample(&busy, {}, absl::ToDoubleSeconds(stats.device_busy));
  families->push_back(std::move(busy));
}

Totals Metrics::totals() const {
  Totals totals;
  totals.payload_bytes_in = payload_in_.Value();
  totals.payload_bytes_out = payload_out_.Value();
  totals.steps = events_->steps.Value();
  for (const MetricFamily& family : errors_.Collect()) {
    for (const prometheus::ClientMetric& metric : family.metric) totals.errors += metric.counter.value;
  }
  totals.rows = static_cast<double>(heads_.total_rows());
  return totals;
}

Latencies Metrics::latencies() const {
  Latencies latencies;
  latencies[0] = microbatch_seconds_.Collect().histogram;
  for (size_t i = 0; i < kPhases; ++i) latencies[1 + i] = phase_seconds_[i]->Collect().histogram;
  return latencies;
}

double EstimateQuantile(const prometheus::ClientMetric::Histogram& histogram, double quantile) {
  if (histogram.sample_count == 0) return 0.0;
  const double rank = quantile * static_cast<double>(histogram.sample_count);
  double lower_bound = 0.0;
  double below = 0.0;
  for (const prometheus::ClientMetric::Bucket& bucket : histogram.bucket) {
    if (std::isinf(bucket.upper_bound)) break;
    const auto cumulative = static_cast<double>(bucket.cumulative_count);
    if (cumulative >= rank && cumulative > below) {
      return lower_bound + (bucket.upper_bound - lower_bound) * (rank - below) / (cumulative - below);
    }
    lower_bound = bucket.upper_bound;
    below = cumulative;
  }
  return lower_bound;
}

}  // namespace lossd::metrics
