// SPDX-License-Identifier: Apache-2.0
// Used instead of gpu_backend_cuda.cc in a build without a CUDA compiler: every function returns UNAVAILABLE.
// The file is shorter than 60 lines because it does nothing else.
#include "kernels/create_backend.h"

namespace lossd::kernels {

absl::StatusOr<std::unique_ptr<Backend>> CreateGpuBackend(const BackendChoice&) {
  return absl::UnavailableError("this build has no CUDA backend");
}

absl::StatusOr<std::vector<std::string>> GpuUuidsOf(const std::string&) {
  return absl::UnavailableError("this build has no CUDA backend");
}

absl::StatusOr<std::unique_ptr<RankLink>> CreateGpuLink(const BackendChoice&, Backend*) {
  return absl::UnavailableError("this build has no CUDA backend");
}

}  // namespace lossd::kernels
