// SPDX-License-Identifier: Apache-2.0
#include "bench/norm_times.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "kernels/cuda/kernels/norm/norm.h"

namespace lossd::bench {
namespace {

namespace cuda = ::lossd::kernels::cuda;
using kernels::DType;

constexpr int kLaunches = 16;          // timed together: one takes little longer than an event
constexpr size_t kDistinct = 1000003;  // elements; then they repeat

struct NormBuffers {
  void *x, *y, *dx;
};

}  // namespace

NormTimes TimeNorm(int64_t cols, bool centred, Timer& timer) {
  const int64_t elements = kNormRows * cols;
  // Enough sets that none is still in L2 when its turn comes again.
  const int sets = static_cast<int>(std::clamp<int64_t>((int64_t{512} << 20) / (elements * 6), 2, 16));
  std::vector<NormBuffers> buffers;
  std::vector<uint16_t> noise(static_cast<size_t>(elements));
  std::mt19937 rng(std::random_device{}());
  for (size_t i = 0; i < noise.size(); ++i) {
    noise[i] = i < kDistinct
                   ? static_cast<uint16_t>(0x3000u + (rng() & 0x8bffu))  // fp16, magnitude 1/8 ... 1
                   : noise[i - kDistinct];
  }
  for (int i = 0; i < sets; ++i) {
    buffers.push_back(
        {DeviceAlloc<uint16_t>(elements), DeviceAlloc<uint16_t>(elements), DeviceAlloc<uint16_t>(elements)});
    Check(cudaMemcpy(buffers.back().x, noise.data(), noise.size() * 2, cudaMemcpyDefault), "cudaMemcpy");
  }
  cudaDeviceProp properties = {};
  Check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  const cuda::DeviceLimits limits = {
      .multiprocessors = properties.multiProcessorCount,
      .shared_bytes_per_block = static_cast<int>(properties.sharedMemPerBlockOptin) - (2 << 10),
      .shared_bytes_per_sm = static_cast<int>(properties.sharedMemPerMultiprocessor),
      .has_clusters = properties.major >= 9,
      .is_hopper = properties.major == 9 && properties.minor == 0};
  auto* params = DeviceAlloc<float>(4 * cols + 2 * kNormRows);
  Check(cudaMemcpy(params, noise.data(), static_cast<size_t>(cols) * 8, cudaMemcpyDefault), "cudaMemcpy");
  auto* partials = DeviceAlloc<float>(cuda::NormPartialFloats(cols, limits.multiprocessors));
  const auto norm = [&](const NormBuffers& b) {
    cuda::NormParams p;
    p.centred = centred;
    p.gain = params;
    p.shift = params + cols;
    p.rows = kNormRows;
    p.x = {b.x, DType::kFloat16, cols, cols};
    p.y = {b.y, DType::kFloat16, cols, cols};
    p.mean = params + 4 * cols;
    p.inverse_deviation = params + 4 * cols + kNormRows;
    return p;
  };
  const Times forward = timer.MeasureEach(20, kLaunches, [&](int i) {
    Check(cuda::LaunchNormForward(norm(buffers[static_cast<size_t>(i % sets)]), limits, timer.stream()),
          "LaunchNormForward");
  });
  const Times backward = timer.MeasureEach(20, kLaunches, [&](int i) {
    const NormBuffers& b = buffers[static_cast<size_t>(i % sets)];
    cuda::NormBackwardParams back;
    back.dx = {b.dx, DType::kFloat16, cols, cols};
    back.gain_gradient = params + 2 * cols;
    back.shift_gradient = params + 3 * cols;
    back.partials = partials;
    Check(cuda::LaunchNormBackward(norm(b), back, limits, timer.stream()), "LaunchNormBackward");
  });
  for (const NormBuffers& b : buffers) {
    cudaFree(b.x);
    cudaFree(b.y);
    cudaFree(b.dx);
  }
  cudaFree(params);
  cudaFree(partials);
  const double pass = static_cast<double>(elements) * 2.0 / 1e6;
  return {forward, backward, 2.0 * pass / forward.median, 3.0 * pass / backward.median};
}

}  // namespace lossd::bench
