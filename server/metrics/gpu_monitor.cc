// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/gpu_monitor.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/clocks/clock.h"
#include "server/metrics/families.h"

namespace lossd::metrics {

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
  if (absl::Status status = nvml->Find(); !status.ok()) return status;
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

using prometheus::MetricFamily;
using prometheus::MetricType;

constexpr uint64_t kFellOffTheBus = 79;                    // an Xid
constexpr absl::Duration kLook = absl::Milliseconds(100);  // between questions for events

// Bits of NVML's throttle reasons that slow a busy GPU down.
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
  absl::StatusOr<std::unique_ptr<Nvml>> nvml = Nvml::Load(options.library);
  if (!nvml.ok()) return nvml.status();
  std::unique_ptr<GpuMonitor> monitor(new GpuMonitor(std::move(options), *std::move(nvml)));
  if (absl::Status status = monitor->Open(); !status.ok()) return status;
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
  // NVML's own wait keeps a core busy for each GPU with some drivers, so it is only asked.
  while (events_ != nullptr && !lost_) {
    const absl::Duration left = end - clocks::SteadyNow();
    if (left <= absl::ZeroDuration() || Pause(std::min(left, kLook))) return;
    NvmlEvent event = {};
    const int result = nvml_->event_set_wait(events_, &event, /*timeout_ms=*/0);
    if (result == kNvmlTimeout) continue;
    if (!Succeeded(result)) {  // no events any more; samples go on
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

}  // namespace lossd::metrics
