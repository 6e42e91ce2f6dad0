// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_group.h"

#include <cuda_runtime_api.h>

#include <numeric>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/cuda_replicas.h"
#include "kernels/group/group_backend.h"

namespace lossd::bench {

absl::StatusOr<std::unique_ptr<kernels::Backend>> CreateGpus(int devices,
                                                             const kernels::CudaBackendOptions& options) {
  if (devices == 1) return kernels::CreateCudaBackend(options);
  std::vector<std::unique_ptr<kernels::Backend>> members;
  for (int i = 0; i < devices; ++i) {
    kernels::CudaBackendOptions own = options;
    own.device = i;
    own.replica = {i, devices};
    auto member = kernels::CreateCudaBackend(own);
    if (!member.ok()) return member.status();
    members.push_back(*std::move(member));
  }
  std::vector<int> gpus(static_cast<size_t>(devices));
  std::iota(gpus.begin(), gpus.end(), 0);
  auto connection = kernels::CudaReplicaGroup::Create(std::move(gpus));
  if (!connection.ok()) return connection.status();
  const std::shared_ptr<kernels::CudaReplicaGroup> shared = *std::move(connection);
  if (cudaSetDevice(0) != cudaSuccess) return absl::UnavailableError("cudaSetDevice failed");
  using Heads = absl::Span<kernels::HeadKernels* const>;
  return kernels::CreateGroupBackend(std::move(members),
                                     [shared](Heads heads) { return shared->Connect(heads); },
                                     {.join_classes = [shared](Heads heads) { return shared->Join(heads); }});
}

}  // namespace lossd::bench
