// SPDX-License-Identifier: Apache-2.0
// GpuMonitor watches one GPU through NVML, NVIDIA's management library. It reports power, temperature,
// memory, utilisation, throttling and ECC errors as metrics, and critical errors (Xid) as they happen, so the
// server also notices the loss of an idle device. Nvml has the functions of the library that the server uses.
//
// Both classes are thread-safe.
#ifndef LOSSD_SERVER_METRICS_GPU_MONITOR_H_
#define LOSSD_SERVER_METRICS_GPU_MONITOR_H_

#include <prometheus/metric_family.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace lossd::metrics {

// ---- The part of NVML's interface that the server uses ----

inline constexpr char kNvmlLibrary[] = "libnvidia-ml.so.1";

// Return codes.
inline constexpr int kNvmlSuccess = 0;
inline constexpr int kNvmlInsufficientSize = 7;
inline constexpr int kNvmlTimeout = 10;
inline constexpr int kNvmlGpuIsLost = 15;

inline constexpr int kNvmlTemperatureGpu = 0;
inline constexpr int kNvmlCorrected = 0;  // memory error types
inline constexpr int kNvmlUncorrected = 1;
inline constexpr int kNvmlVolatile = 0;  // counted since the driver was loaded
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

// The functions of NVML that the server uses. The library comes with the driver and is looked up when it is
// needed, so the program runs without it. Thread-safe, as NVML is.
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
  // Null if the library is too old. With `count` 0 it only says how many there are.
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
  std::string uuid;                            // of the GPU, "GPU-..."
  absl::Duration interval = absl::Seconds(1);  // between samples
  // Both are called on the monitor's thread.
  absl::AnyInvocable<void(uint64_t xid)> on_xid = [](uint64_t) {};
  absl::AnyInvocable<void(const absl::Status&)> on_lost = [](const absl::Status&) {};  // once
  // So many programs have a context on the GPU, the server among them: once, when there are several.
  absl::AnyInvocable<void(unsigned processes)> on_shared = [](unsigned) {};
};

// Watches one GPU. A thread of the monitor asks NVML once a second and keeps the answers; so a driver that
// hangs holds up neither a scrape nor a probe.
class GpuMonitor {
 public:
  // UNAVAILABLE if NVML cannot be had, or does not know the GPU.
  static absl::StatusOr<std::unique_ptr<GpuMonitor>> Start(GpuMonitorOptions options);
  // Waits for the call of NVML that runs.
  ~GpuMonitor();
  GpuMonitor(const GpuMonitor&) = delete;
  GpuMonitor& operator=(const GpuMonitor&) = delete;

  // The last sample; what the GPU does not report is left out.
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
  // What NVML lets this process see of the programs on the GPU.
  std::optional<unsigned> CountProcesses();
  // True: the monitor stops.
  bool Pause(absl::Duration duration) ABSL_LOCKS_EXCLUDED(mutex_);
  // Notes what a call ended with; true if it gave a value.
  bool Succeeded(int result);

  GpuMonitorOptions options_;
  const std::unique_ptr<Nvml> nvml_;
  NvmlDevice device_ = nullptr;
  NvmlEventSet events_ = nullptr;  // null: the GPU reports none
  bool lost_ = false;              // of the thread
  bool shared_ = false;            // of the thread: on_shared was called

  mutable absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Sample sample_ ABSL_GUARDED_BY(mutex_);
  int64_t xids_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t last_xid_ ABSL_GUARDED_BY(mutex_) = 0;
  std::thread thread_;
};

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_GPU_MONITOR_H_
