// SPDX-License-Identifier: Apache-2.0
// The GPU of the CUDA tests. Without a GPU, these tests are skipped and reported as skipped. Also OnDevice:
// values in the GPU's memory, for tests of single kernels.
#ifndef LOSSD_TESTS_KERNELS_CUDA_CUDA_TEST_DEVICE_H_
#define LOSSD_TESTS_KERNELS_CUDA_CUDA_TEST_DEVICE_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/head_config.h"

namespace lossd::kernels::testing {

inline int GpuCount() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}
inline bool HaveGpu() { return GpuCount() > 0; }

// Whether the GPU has compute capability 9.0, for which the kernels in kernels/cuda/kernels/hopper are built.
inline bool HaveHopperGpu() {
  cudaDeviceProp properties;
  return HaveGpu() && cudaGetDeviceProperties(&properties, 0) == cudaSuccess && properties.major == 9;
}

}  // namespace lossd::kernels::testing

namespace lossd::kernels::cuda::hopper {

// ---- Values on the device, and 16-bit numbers on the host, for the tests of single kernels ----

// A copy of `values` in device memory for as long as the object lives.
template <typename T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& values) : count_(values.size()) {
    EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&data_), count_ * sizeof(T) + 16), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyDefault), cudaSuccess);
  }
  ~OnDevice() { cudaFree(data_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  T* get() const { return data_; }
  std::vector<T> Read() const {
    std::vector<T> values(count_);
    EXPECT_EQ(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDefault), cudaSuccess);
    return values;
  }

 private:
  T* data_ = nullptr;
  size_t count_;
};

inline uint16_t Encode(DType dtype, float x) {
  if (dtype == DType::kBFloat16) return __nv_bfloat16_raw(__float2bfloat16_rn(x)).x;
  return __half_raw(__float2half_rn(x)).x;
}

inline double Decode(DType dtype, uint16_t bits) {
  if (dtype == DType::kBFloat16) {
    const uint32_t word = uint32_t{bits} << 16;
    float x;
    std::memcpy(&x, &word, sizeof(x));
    return static_cast<double>(x);
  }
  __half_raw raw;
  raw.x = bits;
  return static_cast<double>(__half2float(__half(raw)));
}

}  // namespace lossd::kernels::cuda::hopper

#define LOSSD_SKIP_WITHOUT_GPU() \
  if (!::lossd::kernels::testing::HaveGpu()) GTEST_SKIP() << "no CUDA GPU on this machine"

#define LOSSD_SKIP_WITHOUT_HOPPER_GPU() \
  LOSSD_SKIP_WITHOUT_GPU();             \
  if (!::lossd::kernels::testing::HaveHopperGpu()) GTEST_SKIP() << "not a Hopper GPU"

#endif  // LOSSD_TESTS_KERNELS_CUDA_CUDA_TEST_DEVICE_H_
