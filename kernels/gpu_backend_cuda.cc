#include "kernels/cuda/cuda_backend.h"
#include "kernels/gpu_backend.h"

namespace lossd::kernels {

absl::StatusOr<std::unique_ptr<Backend>> CreateGpuBackend(const BackendChoice& choice) {
  CudaBackendOptions options;
  options.device = choice.device;
  options.workspace_bytes = choice.workspace_bytes;
  options.memory_limit_bytes = choice.memory_limit_bytes;
  options.deterministic = choice.deterministic;
  return CreateCudaBackend(options);
}

}  // namespace lossd::kernels
