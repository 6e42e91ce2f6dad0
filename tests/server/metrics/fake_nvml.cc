// SPDX-License-Identifier: Apache-2.0
// A management library of NVIDIA's (NVML) for tests: one GPU, whose figures and events the test sets through
// fake_nvml_set and fake_nvml_event.
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>

#include "server/metrics/metrics.h"

namespace {

constexpr int kSuccess = 0;
constexpr int kNotSupported = 3;
constexpr int kNotFound = 6;
constexpr int kInsufficientSize = 7;
constexpr int kTimeout = 10;

struct State {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, unsigned long long> figures;  // not there: not supported
  std::deque<unsigned long long> xids;
  int result = kSuccess;  // of every call about the device
};
State& TheState() {
  static State state;  // destroyed when the library is unloaded
  return state;
}

int g_device = 0;
int g_events = 0;

int Get(const char* name, unsigned long long* value) {
  const std::lock_guard<std::mutex> lock(TheState().mutex);
  if (TheState().result != kSuccess) return TheState().result;
  const auto it = TheState().figures.find(name);
  if (it == TheState().figures.end()) return kNotSupported;
  *value = it->second;
  return kSuccess;
}

int Get(const char* name, unsigned* value) {
  unsigned long long wide = 0;
  const int result = Get(name, &wide);
  if (result == kSuccess) *value = static_cast<unsigned>(wide);
  return result;
}

}  // namespace

extern "C" {

void fake_nvml_set(const char* name, unsigned long long value) {
  const std::lock_guard<std::mutex> lock(TheState().mutex);
  TheState().figures[name] = value;
}
unsigned long long fake_nvml_get(const char* name) {
  const std::lock_guard<std::mutex> lock(TheState().mutex);
  return TheState().figures[name];
}
void fake_nvml_result(int result) {
  const std::lock_guard<std::mutex> lock(TheState().mutex);
  TheState().result = result;
  TheState().changed.notify_all();
}
void fake_nvml_no_events() {
  const std::lock_guard<std::mutex> lock(TheState().mutex);
  TheState().xids.clear();
}
void fake_nvml_event(unsigned long long xid) {
  const std::lock_guard<std::mutex> lock(TheState().mutex);
  TheState().xids.push_back(xid);
  TheState().changed.notify_all();
}

int nvmlInit_v2() { return kSuccess; }
int nvmlShutdown() { return kSuccess; }
const char* nvmlErrorString(int result) {
  return result == 15 ? "GPU is lost" : result == 6 ? "Not Found" : "Other";
}
int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  if (std::strcmp(uuid, "GPU-01234567-89ab-cdef-0123-456789abcdef") != 0) return kNotFound;
  *device = &g_device;
  return kSuccess;
}
int nvmlDeviceGetPowerUsage(void*, unsigned* value) { return Get("power", value); }
int nvmlDeviceGetTemperature(void*, int, unsigned* value) { return Get("temperature", value); }
int nvmlDeviceGetUtilizationRates(void*, lossd::metrics::NvmlUtilization* value) {
  const int result = Get("utilization", &value->gpu);
  return result == kSuccess ? Get("memory_utilization", &value->memory) : result;
}
int nvmlDeviceGetMemoryInfo(void*, lossd::metrics::NvmlMemory* value) {
  const int result = Get("memory_used", &value->used);
  value->total = 1000;
  value->free = 1000 - value->used;
  return result;
}
int nvmlDeviceGetTotalEccErrors(void*, int type, int, unsigned long long* value) {
  return Get(type == 0 ? "corrected" : "uncorrected", value);
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void*, unsigned long long* value) {
  return Get("throttled", value);
}
int nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned* count, void*) {
  const unsigned room = *count;
  const int result = Get("processes", count);
  return result == kSuccess && *count > room ? kInsufficientSize : result;
}
int nvmlEventSetCreate(void** events) {
  *events = &g_events;
  return kSuccess;
}
int nvmlEventSetFree(void*) { return kSuccess; }
int nvmlDeviceRegisterEvents(void*, unsigned long long, void*) { return kSuccess; }
int nvmlEventSetWait_v2(void*, lossd::metrics::NvmlEvent* event, unsigned timeout_ms) {
  State& state = TheState();
  std::unique_lock<std::mutex> lock(state.mutex);
  if (timeout_ms > 0) ++state.figures["waits"];
  state.changed.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                         [&] { return !state.xids.empty() || state.result != kSuccess; });
  if (state.result != kSuccess) return state.result;
  if (state.xids.empty()) return kTimeout;
  if (state.xids.front() == 0) {  // of no kind that was asked for, again and again
    *event = {&g_device, 0, 0, 0, 0};
    ++state.figures["idle_events"];
    return kSuccess;
  }
  *event = {&g_device, 0x8, state.xids.front(), 0, 0};
  state.xids.pop_front();
  return kSuccess;
}

}  // extern "C"
