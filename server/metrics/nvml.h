// SPDX-License-Identifier: Apache-2.0
// The functions of NVIDIA's management library (NVML) that the server uses. The library comes with the driver
// and is looked up when it is needed, so the program runs without it; what is declared here is the part of
// its interface that we call.
//
// Thread-safe, as NVML is.
#ifndef LOSSD_SERVER_METRICS_NVML_H_
#define LOSSD_SERVER_METRICS_NVML_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace lossd::metrics {

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

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_NVML_H_
