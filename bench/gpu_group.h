// SPDX-License-Identifier: Apache-2.0
// The CUDA backend of a benchmark, on one GPU or several.
#ifndef LOSSD_BENCH_GPU_GROUP_H_
#define LOSSD_BENCH_GPU_GROUP_H_

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cuda/cuda_options.h"

namespace lossd::bench {

// GPUs [0, devices), which share every head; `options` are those of each.
absl::StatusOr<std::unique_ptr<kernels::Backend>> CreateGpus(int devices,
                                                             const kernels::CudaBackendOptions& options);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_GPU_GROUP_H_
