// SPDX-License-Identifier: Apache-2.0
// Measures times on the device for the GPU benchmarks (Timer), and writes their JSON results, which begin
// with the card, the date and the commit. Not thread-safe; aborts with a message on a CUDA error.
#ifndef LOSSD_BENCH_GPU_TIMER_H_
#define LOSSD_BENCH_GPU_TIMER_H_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "nlohmann/json.hpp"

namespace lossd::bench {

inline constexpr int kWarmUps = 3;
// Large matrix products reach the card's power limit within a fraction of a second. After this time the
// clocks are steady.
inline constexpr double kWarmUpSeconds = 0.4;

using Clock = std::chrono::steady_clock;

inline double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

inline void Check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", call, cudaGetErrorString(error));
  std::abort();
}

inline void Check(const absl::Status& status, const char* call) {
  if (status.ok()) return;
  std::cerr << call << ": " << status << std::endl;
  std::abort();
}

template <typename T>
T Take(absl::StatusOr<T> value, const char* call) {
  Check(value.status(), call);
  return *std::move(value);
}

struct Times {
  double median = 0.0, min = 0.0, max = 0.0;  // ms
};

inline Times Summarise(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times.front(), times.back()};
}

// Measures the device time of `work`, which must enqueue on stream(), between two events on that stream.
// Times are in ms. Measure first calls `work` without counting it (kWarmUps times and for kWarmUpSeconds at
// least), and passes the number of the call, from 0 on.
class Timer {
 public:
  Timer() {
    Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    Check(cudaEventCreate(&begin_), "cudaEventCreate");
    Check(cudaEventCreate(&end_), "cudaEventCreate");
  }
  ~Timer() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
    cudaStreamDestroy(stream_);
  }
  cudaStream_t stream() const { return stream_; }

  double MeasureOnce(const std::function<void()>& work) {
    Check(cudaEventRecord(begin_, stream_), "cudaEventRecord");
    work();
    Check(cudaEventRecord(end_, stream_), "cudaEventRecord");
    Check(cudaEventSynchronize(end_), "cudaEventSynchronize");
    float ms = 0.0f;
    Check(cudaEventElapsedTime(&ms, begin_, end_), "cudaEventElapsedTime");
    return static_cast<double>(ms);
  }

  Times Measure(int iterations, const std::function<void(int)>& work) {
    int count = 0;
    const Clock::time_point begin = Clock::now();
    while (count < kWarmUps || SecondsSince(begin) < kWarmUpSeconds) MeasureOnce([&] { work(count++); });
    std::vector<double> times;
    for (int i = 0; i < iterations; ++i) times.push_back(MeasureOnce([&] { work(count++); }));
    return Summarise(std::move(times));
  }

  // Like Measure, for short work: `launches` runs are timed together. The result is the time of one run.
  Times MeasureEach(int iterations, int launches, const std::function<void(int)>& work) {
    Times t = Measure(iterations, [&](int round) {
      for (int i = 0; i < launches; ++i) work(round * launches + i);
    });
    for (double* value : {&t.median, &t.min, &t.max}) *value /= launches;
    return t;
  }

 private:
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

// Allocates device memory for `count` elements. The caller releases it with cudaFree.
template <typename T>
T* DeviceAlloc(int64_t count) {
  void* data = nullptr;
  Check(cudaMalloc(&data, static_cast<size_t>(count) * sizeof(T)), "cudaMalloc");
  return static_cast<T*>(data);
}

// The bandwidth of a device-to-device copy in GB/s; bytes read and bytes written both count.
inline double CopyBandwidth(Timer& timer) {
  constexpr int64_t kCopyBytes = int64_t{1} << 30;
  auto* from = DeviceAlloc<uint8_t>(kCopyBytes);
  auto* to = DeviceAlloc<uint8_t>(kCopyBytes);
  Check(cudaMemset(from, 7, kCopyBytes), "cudaMemset");
  const Times t = timer.Measure(10, [&](int) {
    Check(cudaMemcpyAsync(to, from, kCopyBytes, cudaMemcpyDeviceToDevice, timer.stream()), "cudaMemcpyAsync");
  });
  cudaFree(from);
  cudaFree(to);
  return 2.0 * static_cast<double>(kCopyBytes) / t.median / 1e6;  // GB/s
}

using Json = nlohmann::json;  // the type of the benchmarks' results

// Starts the results: {"card", "date" (UTC), "commit", "copy_gbps" (measured now)}. Prints the card and its
// bandwidth.
nlohmann::json StartResults(const std::string& commit, Timer& timer);

// {"median_ms", "min_ms", "max_ms"}
nlohmann::json ToJson(const Times& t);
// A list of {"what", "choice", "reason", "workspace_bytes"}.
nlohmann::json ToJson(const std::vector<kernels::Choice>& choices);

// Writes the results to a file; if `path` is empty, does nothing. Ends the program if the file cannot be
// written.
void WriteResults(const nlohmann::json& results, const std::string& path);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_GPU_TIMER_H_
