// SPDX-License-Identifier: Apache-2.0
// Device memory for the GPU benchmarks' data. Aborts on a CUDA error.
#ifndef LOSSD_BENCH_GPU_MEMORY_H_
#define LOSSD_BENCH_GPU_MEMORY_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace lossd::bench::memory {

inline void Check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", call, cudaGetErrorString(error));
  std::abort();
}

template <typename T>
T* Allocate(int64_t count) {
  void* data = nullptr;
  Check(cudaMalloc(&data, static_cast<size_t>(count) * sizeof(T)), "cudaMalloc");
  return static_cast<T*>(data);
}

template <typename T>
T* Upload(const std::vector<T>& values) {
  T* data = Allocate<T>(static_cast<int64_t>(values.size()));
  Check(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  return data;
}

template <typename T>
std::vector<T> Download(const T* data, int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  Check(cudaMemcpy(values.data(), data, values.size() * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return values;
}

}  // namespace lossd::bench::memory

#endif  // LOSSD_BENCH_GPU_MEMORY_H_
