#include <string>
#include <vector>

#include "kernels/cuda/cuda_backend.h"
#include "kernels/device_choice.h"
#include "kernels/gpu_backend.h"

namespace lossd::kernels {

absl::StatusOr<std::unique_ptr<Backend>> CreateGpuBackend(const BackendChoice& choice) {
  const absl::StatusOr<std::vector<std::string>> uuids = VisibleGpuUuids();
  if (!uuids.ok()) return uuids.status();
  const absl::StatusOr<int> device = FindGpu(choice.device, *uuids);
  if (!device.ok()) return device.status();
  CudaBackendOptions options;
  options.device = *device;
  options.workspace_bytes = choice.workspace_bytes;
  options.memory_limit_bytes = choice.memory_limit_bytes;
  options.deterministic = choice.deterministic;
  return CreateCudaBackend(options);
}

}  // namespace lossd::kernels
