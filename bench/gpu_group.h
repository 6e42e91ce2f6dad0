// SPDX-License-Identifier: Apache-2.0
// The CUDA backend of a benchmark, on one GPU or several. Driven by one thread.
#ifndef LOSSD_BENCH_GPU_GROUP_H_
#define LOSSD_BENCH_GPU_GROUP_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cuda/cuda_options.h"
#include "kernels/exchange_times.h"
#include "kernels/group/group_backend.h"
#include "nlohmann/json.hpp"

namespace lossd::bench {

// GPUs [0, devices), which share every head; `options` are those of each.
absl::StatusOr<std::unique_ptr<kernels::Backend>> CreateGpus(int devices,
                                                             const kernels::CudaBackendOptions& options);

// What the GPUs of such a backend spent in exchanges with each other, the wait for the slower one included.
class ExchangeWatch {
 public:
  // Counts from now on. `backend` outlives the object.
  explicit ExchangeWatch(const kernels::Backend& backend);
  // By operation {"least", "most"}: milliseconds, over the GPUs, divided by `count`. Null of one GPU.
  nlohmann::json PerOne(int count) const;

 private:
  std::vector<kernels::ExchangeTimes> Read() const;

  const kernels::Backend& backend_;
  const std::vector<kernels::ExchangeTimes> begin_;
};

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_GPU_GROUP_H_
