// SPDX-License-Identifier: Apache-2.0
// The CUDA backend: one GPU, cuBLASLt for the GEMMs, our own kernels between them
// (docs/kernels/cuda-exact.md, docs/kernels/hopper.md).
//
// The program needs neither the CUDA driver nor cuBLAS to start: both are looked up when a backend is
// created. Compute capability 8.0 or later; tuned for 9.0.
#ifndef LOSSD_KERNELS_CUDA_CUDA_BACKEND_H_
#define LOSSD_KERNELS_CUDA_CUDA_BACKEND_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cuda/cuda_options.h"

namespace lossd::kernels {

// The UUIDs of the visible GPUs, by index. UNAVAILABLE if there is no GPU or no driver.
absl::StatusOr<std::vector<std::string>> VisibleGpuUuids();

// The GPU that memory lies on, by index; -1 if it is none of a GPU. Thread-safe.
int GpuOf(const void* memory);

// INVALID_ARGUMENT naming the option if one is out of range (a wrong device index with the number of
// GPUs), UNAVAILABLE if there is no usable GPU, driver or cuBLAS.
absl::StatusOr<std::unique_ptr<Backend>> CreateCudaBackend(const CudaBackendOptions& options);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CUDA_CUDA_BACKEND_H_
