// SPDX-License-Identifier: Apache-2.0
// The GPU backend of this build: gpu_backend_cuda.cc or, without a CUDA compiler, gpu_backend_none.cc.
#ifndef LOSSD_KERNELS_GPU_BACKEND_H_
#define LOSSD_KERNELS_GPU_BACKEND_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/backend_choice.h"
#include "kernels/rank_link.h"

namespace lossd::kernels {

// UNAVAILABLE if this build or this machine has no usable GPU.
absl::StatusOr<std::unique_ptr<Backend>> CreateGpuBackend(const BackendChoice& choice);

// The UUIDs of the GPUs that `devices` names (device_choice.h), in its order. UNAVAILABLE as above;
// INVALID_ARGUMENT naming the field "devices".
absl::StatusOr<std::vector<std::string>> GpuUuidsOf(const std::string& devices);

// The link of a backend that CreateGpuBackend has made of this choice, which is one of several replicas.
// `backend` outlives RankLink::Connect.
absl::StatusOr<std::unique_ptr<RankLink>> CreateGpuLink(const BackendChoice& choice, Backend* backend);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_GPU_BACKEND_H_
