// SPDX-License-Identifier: Apache-2.0
// The metrics of a server for Prometheus (metrics.h), part by part in the order of the header.
#include "server/metrics/metrics.h"

#include <dlfcn.h>
#include <prometheus/text_serializer.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>
#include <type_traits>

#include "absl/functional/function_ref.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/errors/status_macros.h"

namespace lossd::metrics {
namespace {

using prometheus::MetricFamily;
using prometheus::MetricType;

// Indexes of fields in /proc/self/stat. Index 0 is the field after the command name, which is field 3 in
// proc(5).
constexpr size_t kUserTicks = 14 - 3;
constexpr size_t kSystemTicks = 15 - 3;
constexpr size_t kStartTicks = 22 - 3;
constexpr size_t kVirtualBytes = 23 - 3;
constexpr size_t kResidentPages = 24 - 3;

std::string ReadFile(const char* path) {
  std::ifstream file(path);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

double Number(absl::string_view text) {
  double value = 0.0;
  return absl::SimpleAtod(text, &value) ? value : 0.0;
}

double BootTimeSeconds() {
  const std::string stat = ReadFile("/proc/stat");
  for (const absl::string_view line : absl::StrSplit(stat, '\n')) {
    if (line.substr(0, 6) == "btime ") return Number(line.substr(6));
  }
  return 0.0;
}

int64_t CountOpenFiles() {
  std::error_code error;
  std::filesystem::directory_iterator entries("/proc/self/fd", error);
  if (error) return 0;
  // The descriptor of the listing itself does not count.
  return std::distance(entries, std::filesystem::directory_iterator()) - 1;
}

}  // namespace

std::optional<ProcessStats> ReadProcessStats() {
  const std::string stat = ReadFile("/proc/self/stat");
  const size_t name_end = stat.rfind(')');  // the command name may have any characters, also spaces
  if (name_end == std::string::npos || name_end + 2 > stat.size()) return std::nullopt;
  const std::vector<absl::string_view> fields =
      absl::StrSplit(absl::string_view(stat).substr(name_end + 2), ' ');
  if (fields.size() <= kResidentPages) return std::nullopt;
  const auto ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
  ProcessStats stats;
  stats.cpu_seconds = (Number(fields[kUserTicks]) + Number(fields[kSystemTicks])) / ticks;
  stats.start_time_seconds = BootTimeSeconds() + Number(fields[kStartTicks]) / ticks;
  stats.virtual_bytes = static_cast<int64_t>(Number(fields[kVirtualBytes]));
  stats.resident_bytes = static_cast<int64_t>(Number(fields[kResidentPages])) * sysconf(_SC_PAGESIZE);
  stats.open_fds = CountOpenFiles();
  return stats;
}

std::vector<prometheus::MetricFamily> CollectProcess() {
  const std::optional<ProcessStats> stats = ReadProcessStats();
  if (!stats.has_value()) return {};
  std::vector<prometheus::MetricFamily> families;
  families.push_back(Single("process_cpu_seconds_total", "User and system CPU time spent by the process.",
                            prometheus::MetricType::Counter, stats->cpu_seconds));
  families.push_back(Gauge("process_start_time_seconds",
                           "When the process started, in seconds since the epoch.",
                           stats->start_time_seconds));
  families.push_back(Gauge("process_virtual_memory_bytes", "Virtual memory of the process.",
                           static_cast<double>(stats->virtual_bytes)));
  families.push_back(Gauge("process_resident_memory_bytes", "Resident memory of the process.",
                           static_cast<double>(stats->resident_bytes)));
  families.push_back(
      Gauge("process_open_fds", "Open file descriptors.", static_cast<double>(stats->open_fds)));
  return families;
}

void AddSharedMemoryFamilies(const std::vector<SharedMemoryUse>& uses,
                             std::vector<prometheus::MetricFamily>* families) {
  const auto add = [&](const char* name, const char* help, int64_t SharedMemoryUse::*value) {
    prometheus::MetricFamily family = MakeFamily(name, help, prometheus::MetricType::Gauge);
    for (const SharedMemoryUse& use : uses)
      AddSample(&family, {{"device", use.device}}, static_cast<double>(use.*value));
    families->push_back(std::move(family));
  };
  add("lossd_region_bytes", "Memory that clients of the host share with the server, by device.",
      &SharedMemoryUse::used_bytes);
  add("lossd_region_limit_bytes", "What that may be, by device.", &SharedMemoryUse::limit_bytes);
}

// ---- NVML ----

namespace {

template <typename Function>
bool FindIn(void* file, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(file, name));
  return function != nullptr;
}

}  // namespace

absl::Status Nvml::Find() {
  const bool complete = FindIn(file_, "nvmlInit_v2", init_) && FindIn(file_, "nvmlShutdown", shutdown_) &&
                        FindIn(file_, "nvmlErrorString", error_string_) &&
                        FindIn(file_, "nvmlDeviceGetHandleByUUID", device_by_uuid) &&
                        FindIn(file_, "nvmlDeviceGetPowerUsage", power_usage) &&
                        FindIn(file_, "nvmlDeviceGetTemperature", temperature) &&
                        FindIn(file_, "nvmlDeviceGetUtilizationRates", utilization) &&
                        FindIn(file_, "nvmlDeviceGetMemoryInfo", memory) &&
                        FindIn(file_, "nvmlDeviceGetTotalEccErrors", ecc_errors) &&
                        FindIn(file_, "nvmlDeviceGetCurrentClocksThrottleReasons", throttle_reasons) &&
                        FindIn(file_, "nvmlEventSetCreate", event_set_create) &&
                        FindIn(file_, "nvmlDeviceRegisterEvents", register_events) &&
                        FindIn(file_, "nvmlEventSetWait_v2", event_set_wait) &&
                        FindIn(file_, "nvmlEventSetFree", event_set_free);
  FindIn(file_, "nvmlDeviceGetComputeRunningProcesses_v3", compute_processes);
  return complete ? absl::OkStatus()
                  : absl::UnavailableError(absl::StrCat("NVML lacks a function: ", dlerror()));
}

absl::StatusOr<std::unique_ptr<Nvml>> Nvml::Load(const std::string& library) {
  std::unique_ptr<Nvml> nvml(new Nvml());
  nvml->file_ = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (nvml->file_ == nullptr)
    return absl::UnavailableError(absl::StrCat("NVML cannot be loaded: ", dlerror()));
  LOSSD_RETURN_IF_ERROR(nvml->Find());
  const int result = nvml->init_();
  if (result != kNvmlSuccess) return absl::UnavailableError(nvml->ToStatus(result, "nvmlInit_v2").message());
  nvml->initialized_ = true;
  return nvml;
}

Nvml::~Nvml() {
  if (initialized_) shutdown_();
  if (file_ != nullptr) dlclose(file_);
}

absl::Status Nvml::ToStatus(int result, absl::string_view call) const {
  if (result == kNvmlSuccess) return absl::OkStatus();
  const char* const text = error_string_(result);
  return absl::InternalError(absl::StrCat(call, " failed: ", text == nullptr ? "unknown error" : text));
}

// ---- The monitor ----

namespace {

constexpr uint64_t kFellOffTheBus = 79;                    // the Xid of a GPU that fell off the bus
constexpr absl::Duration kLook = absl::Milliseconds(100);  // between two polls for events

// The throttle reasons of NVML that slow a busy GPU down, and their bits.
struct Reason {
  unsigned long long bit;
  const char* name;
};
constexpr Reason kReasons[] = {{0x04, "software_power_cap"},
                               {0x08, "hardware_slowdown"},
                               {0x20, "software_thermal_slowdown"},
                               {0x40, "hardware_thermal_slowdown"},
                               {0x80, "hardware_power_brake"}};

template <typename Value>
void AddGauge(const char* name, const char* help, const std::optional<Value>& value, double unit,
              std::vector<MetricFamily>* families) {
  if (value.has_value()) families->push_back(Gauge(name, help, static_cast<double>(*value) * unit));
}

}  // namespace

absl::StatusOr<std::unique_ptr<GpuMonitor>> GpuMonitor::Start(GpuMonitorOptions options) {
  LOSSD_TRY(std::unique_ptr<Nvml> nvml, Nvml::Load(options.library));
  std::unique_ptr<GpuMonitor> monitor(new GpuMonitor(std::move(options), std::move(nvml)));
  LOSSD_RETURN_IF_ERROR(monitor->Open());
  monitor->TakeSample();
  monitor->thread_ = std::thread([raw = monitor.get()] { raw->Loop(); });
  return monitor;
}

GpuMonitor::GpuMonitor(GpuMonitorOptions options, std::unique_ptr<Nvml> nvml)
    : options_(std::move(options)), nvml_(std::move(nvml)) {}

absl::Status GpuMonitor::Open() {
  const int found = nvml_->device_by_uuid(options_.uuid.c_str(), &device_);
  if (found != kNvmlSuccess) {
    return absl::UnavailableError(absl::StrCat(nvml_->ToStatus(found, "nvmlDeviceGetHandleByUUID").message(),
                                               " (", options_.uuid, ")"));
  }
  if (nvml_->event_set_create(&events_) != kNvmlSuccess) events_ = nullptr;
  if (events_ != nullptr && nvml_->register_events(device_, kNvmlEventXid, events_) != kNvmlSuccess) {
    nvml_->event_set_free(std::exchange(events_, nullptr));
  }
  return absl::OkStatus();
}

GpuMonitor::~GpuMonitor() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  if (thread_.joinable()) thread_.join();
  if (events_ != nullptr) nvml_->event_set_free(events_);
}

void GpuMonitor::Loop() {
  pthread_setname_np(pthread_self(), "lossd-gpu");
  while (true) {
    AwaitEvent();
    {
      absl::MutexLock lock(&mutex_);
      if (stopping_) return;
    }
    TakeSample();
  }
}

bool GpuMonitor::Pause(absl::Duration duration) {
  absl::MutexLock lock(&mutex_);
  return clocks::AwaitFor(mutex_, absl::Condition(&stopping_), duration);
}

void GpuMonitor::AwaitEvent() {
  const absl::Time end = clocks::SteadyNow() + options_.interval;
  // With some drivers, NVML's own wait keeps a core busy for each GPU. So this polls with a timeout of 0.
  while (events_ != nullptr && !lost_) {
    const absl::Duration left = end - clocks::SteadyNow();
    if (left <= absl::ZeroDuration() || Pause(std::min(left, kLook))) return;
    NvmlEvent event = {};
    const int result = nvml_->event_set_wait(events_, &event, /*timeout_ms=*/0);
    if (result == kNvmlTimeout) continue;
    if (!Succeeded(result)) {  // no more events; samples continue
      if (!lost_) nvml_->event_set_free(std::exchange(events_, nullptr));
      return;
    }
    if ((event.type & kNvmlEventXid) == 0) continue;
    {
      absl::MutexLock lock(&mutex_);
      ++xids_;
      last_xid_ = event.data;
    }
    options_.on_xid(event.data);
    if (event.data == kFellOffTheBus) Succeeded(kNvmlGpuIsLost);
    return;
  }
  Pause(end - clocks::SteadyNow());
}

bool GpuMonitor::Succeeded(int result) {
  if (result == kNvmlGpuIsLost && !std::exchange(lost_, true)) {
    options_.on_lost(
        absl::UnavailableError(absl::StrCat("NVML: ", nvml_->ToStatus(result, "a call").message())));
  }
  return result == kNvmlSuccess;
}

void GpuMonitor::TakeSample() {
  Sample sample;
  const auto take = [&](auto& place, const auto& call) {
    typename std::decay_t<decltype(place)>::value_type value = {};
    if (!lost_ && Succeeded(call(&value))) place = value;
  };
  take(sample.milliwatts, [&](unsigned* value) { return nvml_->power_usage(device_, value); });
  take(sample.celsius,
       [&](unsigned* value) { return nvml_->temperature(device_, kNvmlTemperatureGpu, value); });
  take(sample.utilization, [&](NvmlUtilization* value) { return nvml_->utilization(device_, value); });
  take(sample.memory, [&](NvmlMemory* value) { return nvml_->memory(device_, value); });
  const auto ecc = [&](int type) {
    return [this, type](unsigned long long* value) {
      return nvml_->ecc_errors(device_, type, kNvmlVolatile, value);
    };
  };
  take(sample.corrected, ecc(kNvmlCorrected));
  take(sample.uncorrected, ecc(kNvmlUncorrected));
  sample.processes = CountProcesses();
  take(sample.throttled, [&](unsigned long long* value) { return nvml_->throttle_reasons(device_, value); });
  absl::MutexLock lock(&mutex_);
  sample_ = sample;
}

std::optional<unsigned> GpuMonitor::CountProcesses() {
  if (lost_ || nvml_->compute_processes == nullptr) return std::nullopt;
  unsigned count = 0;
  const int result = nvml_->compute_processes(device_, &count, nullptr);
  if (result != kNvmlInsufficientSize && !Succeeded(result)) return std::nullopt;
  if (count > 1 && !std::exchange(shared_, true)) options_.on_shared(count);
  return count;
}

std::vector<MetricFamily> GpuMonitor::Collect() const {
  absl::MutexLock lock(&mutex_);
  std::vector<MetricFamily> families;
  AddGauge("lossd_gpu_power_watts", "Power that the GPU takes.", sample_.milliwatts, 1e-3, &families);
  AddGauge("lossd_gpu_temperature_celsius", "Temperature of the GPU.", sample_.celsius, 1.0, &families);
  if (sample_.utilization.has_value()) {
    families.push_back(Gauge("lossd_gpu_utilization_ratio", "Share of the time in which a kernel ran.",
                             sample_.utilization->gpu * 1e-2));
    families.push_back(Gauge("lossd_gpu_memory_utilization_ratio",
                             "Share of the time in which device memory was read or written.",
                             sample_.utilization->memory * 1e-2));
  }
  if (sample_.memory.has_value()) {
    families.push_back(Gauge("lossd_gpu_memory_used_bytes", "Memory of the GPU in use, by all processes.",
                             static_cast<double>(sample_.memory->used)));
    families.push_back(Gauge("lossd_gpu_memory_total_bytes", "Memory of the GPU.",
                             static_cast<double>(sample_.memory->total)));
  }
  AddGauge("lossd_gpu_processes",
           "Programs with a context on the GPU that NVML lets this one see, the server among them.",
           sample_.processes, 1.0, &families);
  if (sample_.corrected.has_value() && sample_.uncorrected.has_value()) {
    MetricFamily ecc =
        MakeFamily("lossd_gpu_ecc_errors_total",
                   "Memory errors since the driver was loaded: corrected, uncorrected.", MetricType::Counter);
    AddSample(&ecc, {{"kind", "corrected"}}, static_cast<double>(*sample_.corrected));
    AddSample(&ecc, {{"kind", "uncorrected"}}, static_cast<double>(*sample_.uncorrected));
    families.push_back(std::move(ecc));
  }
  if (sample_.throttled.has_value()) {
    MetricFamily throttled = MakeFamily("lossd_gpu_throttled",
                                        "1 while the GPU is slowed down for the reason.", MetricType::Gauge);
    for (const Reason& reason : kReasons) {
      AddSample(&throttled, {{"reason", reason.name}}, (*sample_.throttled & reason.bit) != 0 ? 1 : 0);
    }
    families.push_back(std::move(throttled));
  }
  families.push_back(Single("lossd_gpu_xid_errors_total", "Critical errors (Xid) of the GPU since the start.",
                            MetricType::Counter, static_cast<double>(xids_)));
  families.push_back(Gauge("lossd_gpu_last_xid", "Number of the last critical error (Xid); 0: none.",
                           static_cast<double>(last_xid_)));
  for (MetricFamily& family : families) {
    for (prometheus::ClientMetric& metric : family.metric)
      metric.label.insert(metric.label.begin(), {"gpu", options_.uuid});
  }
  return families;
}

HeadMetrics::Head& HeadMetrics::At(absl::string_view head) {
  const auto it = heads_.find(head);
  return it != heads_.end() ? it->second : heads_.emplace(std::string(head), Head()).first->second;
}

void HeadMetrics::OnChunkLeft(const engine::ChunkReport& report) {
  const absl::Time now = now_();
  absl::MutexLock lock(&mutex_);
  Head& head = At(report.head);
  // The device times of chunks overlap, because the next chunk is formed while this chunk is computed. Each
  // second is counted only once.
  const absl::Time begin = std::max(busy_until_, now - absl::Seconds(report.device_seconds));
  head.device_seconds += std::max(0.0, absl::ToDoubleSeconds(now - begin));
  busy_until_ = std::max(busy_until_, now);
}

void HeadMetrics::OnChunk(const engine::ChunkReport& report) {
  absl::MutexLock lock(&mutex_);
  Head& head = At(report.head);
  head.rows += report.rows;
  head.valid_rows += report.sums.valid_rows;
  if (report.embedding != kernels::Embedding::kNone) return;  // rows of an embedding have no loss
  if (report.accumulating.valid_rows > 0) head.takes_part = true;
  if (report.accumulating.valid_rows > 0 || !head.takes_part) head.gradients = report.gradients;
  if (report.accumulating.valid_rows == 0) return;  // the chunk takes no part in a step
  head.open.sums += report.sums;
  head.open.accumulating += report.accumulating;
  if (report.gradients == kernels::Gradients::kFiltered) head.open.filtered_rows += report.sums.valid_rows;
}

void HeadMetrics::OnStep(const engine::StepReport& report) {
  const absl::Time now = now_();
  absl::MutexLock lock(&mutex_);
  Head& head = At(report.head);
  Step step = {.number = report.step,
               .closed = now,
               .grad_norm = report.grad_norm,
               .learning_rate = report.learning_rate,
               .rows = report.rows,
               .skipped = report.skipped};
  const OpenStep& open = head.open;
  if (open.accumulating.valid_rows > 0)
    step.loss = open.accumulating.loss / static_cast<double>(open.accumulating.valid_rows);
  if (open.sums.squared_gradient > 0.0) step.gradient_error = open.sums.gradient_error();
  if (open.filtered_rows > 0)
    step.dropped_probability = open.sums.dropped_mass / static_cast<double>(open.filtered_rows);
  if (!head.steps.empty()) step.seconds = absl::ToDoubleSeconds(now - head.steps.front().closed);
  head.open = {};
  head.steps.push_front(step);
  if (head.steps.size() > kSteps) head.steps.pop_back();
}

void HeadMetrics::Forget(absl::string_view head) {
  absl::MutexLock lock(&mutex_);
  const auto it = heads_.find(head);
  if (it == heads_.end()) return;
  rows_of_gone_heads_ += it->second.rows;
  heads_.erase(it);
}

std::map<std::string, HeadMetrics::Summary> HeadMetrics::Summaries() const {
  absl::ReaderMutexLock lock(&mutex_);
  std::map<std::string, Summary> summaries;
  for (const auto& [name, head] : heads_) summaries[name] = SummaryOf(head);
  return summaries;
}

HeadMetrics::Summary HeadMetrics::SummaryOf(absl::string_view head) const {
  absl::ReaderMutexLock lock(&mutex_);
  const auto it = heads_.find(head);
  return it == heads_.end() ? Summary() : SummaryOf(it->second);
}

HeadMetrics::Summary HeadMetrics::SummaryOf(const Head& head) {
  Summary summary{.rows = head.rows, .gradients = head.gradients};
  if (!head.steps.empty()) summary.last = head.steps.front();
  return summary;
}

std::vector<HeadMetrics::Step> HeadMetrics::Steps(absl::string_view head) const {
  absl::ReaderMutexLock lock(&mutex_);
  const auto it = heads_.find(head);
  if (it == heads_.end()) return {};
  return {it->second.steps.begin(), it->second.steps.end()};
}

int64_t HeadMetrics::total_rows() const {
  absl::ReaderMutexLock lock(&mutex_);
  int64_t rows = rows_of_gone_heads_;
  for (const auto& [name, head] : heads_) rows += head.rows;
  return rows;
}

void HeadMetrics::Collect(std::vector<MetricFamily>* families) const {
  const auto gauge = [](const char* name, const char* help) {
    return MakeFamily(name, help, MetricType::Gauge);
  };
  MetricFamily rows = MakeFamily("lossd_rows_total", "Rows computed, by head.", MetricType::Counter);
  MetricFamily device = MakeFamily(
      "lossd_head_device_seconds_total",
      "Time in which a chunk of the head was on the device; where chunks of several heads overlap, it "
      "counts for the first of them to leave.",
      MetricType::Counter);
  MetricFamily valid_rows = MakeFamily(
      "lossd_valid_rows_total", "Rows computed that have a target, by head: tokens as trainers count them.",
      MetricType::Counter);
  MetricFamily step = gauge("lossd_head_step", "Number of the head's last closed step.");
  MetricFamily step_rows = gauge("lossd_head_step_rows", "Rows in the gradients of the head's last step.");
  MetricFamily seconds = gauge("lossd_head_step_seconds",
                               "Time between the closing of the head's last step and of the one before it.");
  MetricFamily loss =
      gauge("lossd_head_loss",
            "Mean loss of the rows whose gradients were computed for the head's last step, in "
            "nats, row weights applied; rows that were sent twice count twice.");
  MetricFamily norm = gauge("lossd_head_gradient_norm",
                            "2-norm of the head's weight gradients in its last step, before clipping.");
  MetricFamily error = gauge("lossd_head_gradient_error_ratio",
                             "Predicted relative error of the sampled gradients of the head's last step.");
  MetricFamily dropped = gauge("lossd_head_dropped_probability",
                               "Probability left out of the filtered gradients of the head's last step, mean "
                               "per valid row.");
  MetricFamily rate = gauge("lossd_head_learning_rate", "Learning rate of the head's last step.");
  {
    absl::ReaderMutexLock lock(&mutex_);
    for (const auto& [name, head] : heads_) {
      const Labels labels = {{"head", name}};
      AddSample(&rows, labels, static_cast<double>(head.rows));
      AddSample(&device, labels, head.device_seconds);
      AddSample(&valid_rows, labels, static_cast<double>(head.valid_rows));
      if (head.steps.empty()) continue;
      const Step& last = head.steps.front();
      AddSample(&step, labels, static_cast<double>(last.number));
      AddSample(&step_rows, labels, static_cast<double>(last.rows));
      if (last.seconds.has_value()) AddSample(&seconds, labels, *last.seconds);
      if (last.loss.has_value()) AddSample(&loss, labels, *last.loss);
      if (last.gradient_error.has_value()) AddSample(&error, labels, *last.gradient_error);
      if (last.dropped_probability.has_value()) AddSample(&dropped, labels, *last.dropped_probability);
      AddSample(&norm, labels, last.grad_norm);
      AddSample(&rate, labels, last.learning_rate);
    }
  }
  for (MetricFamily* family :
       {&rows, &device, &valid_rows, &step, &step_rows, &seconds, &loss, &norm, &rate, &error, &dropped}) {
    families->push_back(std::move(*family));
  }
}

void CollectPaging(absl::Span<const engine::HeadSnapshot> heads, std::vector<MetricFamily>* families) {
  struct OfHeads {
    MetricFamily family;
    double (*value)(const kernels::PagingStats&);
  };
  const auto counter = [](const char* name, const char* help) {
    return MakeFamily(name, help, MetricType::Counter);
  };
  OfHeads series[] = {
      {MakeFamily("lossd_head_on_device",
                  "1 while the values of a head that lives in host memory are on the device, else 0.",
                  MetricType::Gauge),
       [](const kernels::PagingStats& p) { return p.on_device ? 1.0 : 0.0; }},
      {counter("lossd_head_pool_hits_total", "Chunks that found a head from host memory on the device."),
       [](const kernels::PagingStats& p) { return static_cast<double>(p.hits); }},
      {counter("lossd_head_pool_copies_total",
               "Chunks that a head was copied for from host memory to the device."),
       [](const kernels::PagingStats& p) { return static_cast<double>(p.copies); }},
      {counter("lossd_head_pool_evictions_total",
               "Times that a head from host memory left the device for another one."),
       [](const kernels::PagingStats& p) { return static_cast<double>(p.evictions); }},
      {counter("lossd_head_pool_copied_bytes_total", "Bytes of a head that were copied from host memory."),
       [](const kernels::PagingStats& p) { return static_cast<double>(p.copied_bytes); }},
      {counter("lossd_head_pool_copy_seconds_total",
               "Time that copies of a head from host memory took; other chunks may have been computed "
               "meanwhile."),
       [](const kernels::PagingStats& p) { return absl::ToDoubleSeconds(p.copying); }},
  };
  for (OfHeads& one : series) {
    for (const engine::HeadSnapshot& head : heads) {
      if (head.paging.has_value()) AddSample(&one.family, {{"head", head.name}}, one.value(*head.paging));
    }
    families->push_back(std::move(one.family));
  }
}

// ---- Saves ----

namespace {

prometheus::Histogram::BucketBoundaries SaveBuckets() {
  return {0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0};
}

}  // namespace

SaveMetrics::SaveMetrics(prometheus::Registry& registry)
    : by_result_(
          CounterFamily(registry, "lossd_checkpoint_saves_total",
                        "Checkpoints that were to be saved, by result: ok, failed, cancelled, exists.")),
      saved_(by_result_.Add({{"result", "ok"}})),
      failed_(by_result_.Add({{"result", "failed"}})),
      cancelled_(by_result_.Add({{"result", "cancelled"}})),
      existing_(by_result_.Add({{"result", "exists"}})),
      saved_bytes_(
          CounterFamily(registry, "lossd_checkpoint_saved_bytes_total", "Bytes of saved checkpoints.")
              .Add({})),
      seconds_(HistogramFamily(registry, "lossd_checkpoint_save_seconds",
                               "Time from the start of a save until it was on the disk.")
                   .Add({}, SaveBuckets())),
      buffered_(prometheus::BuildGauge()
                    .Name("lossd_checkpoint_buffered_bytes")
                    .Help("Bytes that the running save has read from the device and not yet written.")
                    .Register(registry)
                    .Add({})),
      removed_(CounterFamily(registry, "lossd_checkpoint_removals_total",
                             "Checkpoints that were removed, by cause: keep, client.")),
      pruned_(removed_.Add({{"cause", "keep"}})),
      deleted_(removed_.Add({{"cause", "client"}})) {}

void SaveMetrics::OnSaved(absl::string_view head, Save save) {
  saved_.Increment();
  saved_bytes_.Increment(static_cast<double>(save.bytes));
  seconds_.Observe(save.seconds);
  save.time = clocks::WallNow();
  absl::MutexLock lock(&mutex_);
  std::deque<Save>& saves = last_[std::string(head)];
  saves.push_front(std::move(save));
  if (saves.size() > kSaves) saves.pop_back();
}

std::vector<SaveMetrics::Save> SaveMetrics::Saves(absl::string_view head) const {
  absl::ReaderMutexLock lock(&mutex_);
  const auto saves = last_.find(head);
  if (saves == last_.end()) return {};
  return {saves->second.begin(), saves->second.end()};
}

void SaveMetrics::OnFailed(const absl::Status& status) {
  if (absl::IsCancelled(status)) {
    cancelled_.Increment();
  } else if (absl::IsAlreadyExists(status)) {
    existing_.Increment();
  } else {
    failed_.Increment();
  }
}

void SaveMetrics::OnRemoved(Cause cause, size_t count) {
  (cause == Cause::kPruned ? pruned_ : deleted_).Increment(static_cast<double>(count));
}

void SaveMetrics::ForgetHead(absl::string_view head) {
  absl::MutexLock lock(&mutex_);
  if (const auto save = last_.find(head); save != last_.end()) last_.erase(save);
}

void SaveMetrics::Collect(std::vector<MetricFamily>* families) const {
  MetricFamily step = MakeFamily("lossd_checkpoint_last_step",
                                 "Step of the head's last saved checkpoint, by head.", MetricType::Gauge);
  MetricFamily time = MakeFamily("lossd_checkpoint_last_success_timestamp_seconds",
                                 "When the head's last checkpoint was saved, by head.", MetricType::Gauge);
  absl::ReaderMutexLock lock(&mutex_);
  for (const auto& [head, saves] : last_) {
    const Save& last = saves.front();
    AddSample(&step, {{"head", head}}, static_cast<double>(last.step));
    AddSample(&time, {{"head", head}}, absl::ToDoubleSeconds(last.time - absl::UnixEpoch()));
  }
  families->push_back(std::move(step));
  families->push_back(std::move(time));
}

namespace {

using kernels::RankState;

// Adds a counter with a sample for each rank for which `value` returns a number.
void AddCounter(const std::vector<RankReading>& ranks, const char* name, const char* help,
                absl::FunctionRef<std::optional<int64_t>(const RankState&)> value,
                std::vector<MetricFamily>* families) {
  MetricFamily family = MakeFamily(name, help, MetricType::Counter);
  for (const RankReading& one : ranks) {
    const std::optional<int64_t> count = value(one.state);
    if (!count.has_value()) continue;
    AddSample(&family, {{"rank", absl::StrCat(one.state.rank)}}, static_cast<double>(*count));
  }
  families->push_back(std::move(family));
}

std::optional<int64_t> BytesOf(const RankState& rank, int64_t kernels::RankTraffic::*bytes) {
  return rank.traffic.has_value() ? std::optional(*rank.traffic.*bytes) : std::nullopt;
}

void AddWork(const std::vector<RankReading>& ranks, std::vector<MetricFamily>* families) {
  AddCounter(
      ranks, "lossd_rank_chunks_total", "Chunks, or parts of them, that a rank has computed.",
      [](const RankState& rank) { return rank.chunks; }, families);
  AddCounter(
      ranks, "lossd_rank_rows_total", "Rows of these.", [](const RankState& rank) { return rank.rows; },
      families);
  AddCounter(
      ranks, "lossd_rank_sent_bytes_total", "Bytes of messages from rank 0 to a worker.",
      [](const RankState& rank) { return BytesOf(rank, &kernels::RankTraffic::sent_bytes); }, families);
  AddCounter(
      ranks, "lossd_rank_received_bytes_total", "Bytes of messages from a worker to rank 0.",
      [](const RankState& rank) { return BytesOf(rank, &kernels::RankTraffic::received_bytes); }, families);
}

}  // namespace

std::vector<MetricFamily> RankTimeFamilies(const kernels::RankTimes& times) {
  MetricFamily collectives =
      MakeFamily("lossd_rank_collective_seconds_total",
                 "Of that, in exchanges with the other ranks and the wait for them, by what is exchanged.",
                 MetricType::Counter);
  for (size_t kind = 0; kind < kernels::kExchangeKinds; ++kind) {
    const auto operation = std::string(kernels::Name(static_cast<kernels::ExchangeKind>(kind)));
    AddSample(&collectives, {{"operation", operation}}, absl::ToDoubleSeconds(times.exchanges[kind]));
  }
  return {Single("lossd_rank_busy_seconds_total", "Time in which a rank had chunks or requests to do.",
                 MetricType::Counter, absl::ToDoubleSeconds(times.busy)),
          std::move(collectives)};
}

void AddRankLabel(int rank, std::vector<MetricFamily>* families) {
  for (MetricFamily& family : *families) {
    for (prometheus::ClientMetric& metric : family.metric)
      metric.label.insert(metric.label.begin(), {"rank", absl::StrCat(rank)});
  }
}

void AddRankFamilies(std::vector<RankReading> ranks, std::vector<MetricFamily>* families) {
  if (ranks.empty()) return;
  MetricFamily up = MakeFamily("lossd_rank_up", "1 while this rank is there, else 0.", MetricType::Gauge);
  MetricFamily memory =
      MakeFamily("lossd_rank_memory_bytes", "Planned memory in use, by rank and purpose.", MetricType::Gauge);
  MetricFamily peak = MakeFamily("lossd_rank_memory_peak_bytes",
                                 "Most planned memory of a rank since the start.", MetricType::Gauge);
  for (const RankReading& reading : ranks) {
    const RankState& one = reading.state;
    const std::string rank = absl::StrCat(one.rank);
    AddSample(&up, {{"rank", rank}, {"host", one.host}, {"device", one.device}}, one.lost ? 0 : 1);
    AddSample(&peak, {{"rank", rank}}, static_cast<double>(one.memory.peak_total));
    for (size_t kind = 0; kind < kernels::kMemoryKinds; ++kind) {
      const auto name = std::string(kernels::Name(static_cast<kernels::MemoryKind>(kind)));
      AddSample(&memory, {{"rank", rank}, {"kind", name}},
                static_cast<double>(one.memory.current.by_kind[kind]));
    }
  }
  families->push_back(std::move(up));
  families->push_back(std::move(memory));
  families->push_back(std::move(peak));
  AddWork(ranks, families);
  const size_t own = families->size();
  for (RankReading& one : ranks) {
    AddRankLabel(one.state.rank, &one.metrics);
    AddFamilies(std::move(one.metrics), own, families);
  }
}

std::vector<PlainFamily> WorkerFamilies(const kernels::RankTimes& times,
                                        absl::Span<const std::unique_ptr<GpuMonitor>> gpus) {
  std::vector<MetricFamily> families = RankTimeFamilies(times);
  const size_t of_gpus = families.size();
  for (const std::unique_ptr<GpuMonitor>& gpu : gpus) {
    if (gpu != nullptr) AddFamilies(gpu->Collect(), of_gpus, &families);
  }
  return ToPlain(families);
}

std::vector<PlainFamily> ToPlain(const std::vector<MetricFamily>& families) {
  std::vector<PlainFamily> out;
  for (const MetricFamily& family : families) {
    out.push_back({.name = family.name, .help = family.help, .counter = family.type == MetricType::Counter});
    for (const prometheus::ClientMetric& metric : family.metric) {
      PlainFamily::Sample sample;
      sample.value = out.back().counter ? metric.counter.value : metric.gauge.value;
      for (const auto& [name, value] : metric.label) sample.labels.emplace_back(name, value);
      out.back().samples.push_back(std::move(sample));
    }
  }
  return out;
}

std::vector<MetricFamily> FromPlain(const std::vector<PlainFamily>& families) {
  std::vector<MetricFamily> out;
  for (const PlainFamily& family : families) {
    out.push_back(
        MakeFamily(family.name, family.help, family.counter ? MetricType::Counter : MetricType::Gauge));
    for (const PlainFamily::Sample& sample : family.samples) {
      AddSample(&out.back(), sample.labels, sample.value);
    }
  }
  return out;
}

namespace {

using kernels::Gradients;

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

// The level of the event for a call that ended with this code. A cancelled call is information, because its
// client knows about it. INTERNAL and DATA_LOSS are errors, which an operator must look at.
EventLevel LevelOf(absl::string_view code) {
  if (code == "CANCELLED") return EventLevel::kInfo;
  return code == "INTERNAL" || code == "DATA_LOSS" ? EventLevel::kError : EventLevel::kWarning;
}

// Adds the spans of a chunk that leaves the device now, and of its slices.
void TraceChunk(const engine::ChunkReport& report, TraceRecorder* trace) {
  static std::atomic<uint64_t> number{0};  // numbers the chunks of all heads
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
  prometheus::Family<prometheus::Counter>& embedding_rows_family =
      CounterFamily(registry, "lossd_embedding_rows_total",
                    "Rows of embeddings, over all heads, by kind: rows served, or gradients of rows added.");
  prometheus::Counter& served_rows = embedding_rows_family.Add({{"kind", "rows"}});
  prometheus::Counter& row_gradients = embedding_rows_family.Add({{"kind", "gradients"}});
  prometheus::Counter& device_errors =
      CounterFamily(registry, "lossd_device_errors_total", "Operations that failed on the device.").Add({});
  prometheus::Gauge& device_lost =
      prometheus::BuildGauge()
          .Name("lossd_device_lost")
          .Help("1 once the device is lost: every call that needs it fails, else 0.")
          .Register(registry)
          .Add({});

  prometheus::Counter& EmbeddingRows(kernels::Embedding embedding) const {
    return embedding == kernels::Embedding::kRows ? served_rows : row_gradients;
  }
  // The counter of the chunks with gradients of this kind.
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
      engine_series_(std::make_unique<EngineSeries>(registry_)),
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
  // The limits of HTTP are not flags.
  const bool is_flag = !absl::StartsWith(flag, "http_connections");
  event_log_.Count(EventLevel::kWarning, "limit_reached", "",
                   absl::StrCat(is_flag ? "--" : "", flag, " was reached"));
}

void Metrics::ForgetHead(absl::string_view head) {
  saves_.ForgetHead(head);
  heads_.Forget(head);
}

void Metrics::OnChunk(const engine::ChunkReport& report) {
  if (report.embedding != kernels::Embedding::kNone) {
    engine_series_->EmbeddingRows(report.embedding).Increment(static_cast<double>(report.sums.valid_rows));
  } else {
    engine_series_->Chunks(report.gradients).Increment();
    engine_series_->ChunkRows(report.gradients).Observe(static_cast<double>(report.sums.valid_rows));
  }
  if (report.gradients == Gradients::kSampled)
    engine_series_->gradient_error.Observe(report.sums.gradient_error());
  engine_series_->dropped_mass.Increment(report.sums.dropped_mass);
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

// Choices are logged by DeviceWatch (server/app) and have no metric.
void Metrics::OnChoices(const engine::ChoicesReport&) {}

void Metrics::OnContribution(const engine::ContributionReport& report) {
  engine_series_->contribution_rows.Increment(static_cast<double>(report.added_rows));
}

void Metrics::OnStep(const engine::StepReport& report) {
  if (report.made_not_finite > 0) {
    engine_series_->diverged_steps.Increment();
    return event_log_.Count(EventLevel::kError, "weights_not_finite", report.head,
                            "a step made weights or moments infinite or NaN; the head is not usable now");
  }
  engine_series_->steps.Increment();
  if (report.skipped) {
    engine_series_->skipped_steps.Increment();
    event_log_.Count(EventLevel::kWarning, "step_skipped", report.head,
                     "a step was closed without an update: its gradients were not finite");
  }
  heads_.OnStep(report);
  const absl::Time now = clocks::SteadyNow();
  trace_.Add(report.head,
             {.kind = SpanKind::kStep, .id = report.step, .rows = report.rows, .begin = now, .end = now});
}

void Metrics::OnDeviceError(const absl::Status& status) {
  engine_series_->device_errors.Increment();
  const bool lost = absl::IsUnavailable(status);
  if (lost) engine_series_->device_lost.Set(1);
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
    if (engine_ != nullptr) {
      CollectEngine(&families);
      CollectPaging(engine_->List(), &families);
    }
    if (backend_ != nullptr) CollectMemory(*backend_, &families);
    if (shared_memory_) AddSharedMemoryFamilies(shared_memory_(), &families);
    const size_t of_server = families.size();
    if (ranks_) AddRankFamilies(ranks_(), &families);
    // Whether there are several ranks. The first of these ranks belong to this process.
    const bool several = families.size() > of_server;
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
  totals.steps = engine_series_->steps.Value();
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
