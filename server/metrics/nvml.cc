// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/nvml.h"

#include <dlfcn.h>

#include "absl/strings/str_cat.h"

namespace lossd::metrics {
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

}  // namespace lossd::metrics
