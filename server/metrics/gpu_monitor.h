// SPDX-License-Identifier: Apache-2.0
// Watches one GPU through NVML: power, temperature, memory, utilisation, throttling, ECC errors as metrics,
// and critical errors (Xid) as they happen. So the loss of an idle device is noticed too.
//
// A thread of its own asks NVML once a second and keeps the answers; a driver that hangs therefore holds up
// neither a scrape nor a probe. Thread-safe.
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
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/metrics/nvml.h"

namespace lossd::metrics {

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
  bool shared_ = false;            // likewise: on_shared was called

  mutable absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Sample sample_ ABSL_GUARDED_BY(mutex_);
  int64_t xids_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t last_xid_ ABSL_GUARDED_BY(mutex_) = 0;
  std::thread thread_;
};

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_GPU_MONITOR_H_
