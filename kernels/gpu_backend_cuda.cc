// SPDX-License-Identifier: Apache-2.0
// The GPU backend of a build with CUDA: creates CUDA backends, groups of GPUs and their links
// (create_backend.h).
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/gloo_link.h"
#include "kernels/create_backend.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/device_choice.h"
#include "kernels/group/group_backend.h"

namespace lossd::kernels {

namespace {

StreamPriority PriorityOf(const BackendChoice& choice) {
  if (choice.stream_priority == "all") return StreamPriority::kAll;
  return choice.stream_priority == "none" ? StreamPriority::kNone : StreamPriority::kHiddenGradients;
}

absl::StatusOr<std::unique_ptr<Backend>> CreateOne(const BackendChoice& choice, int device, Replica replica) {
  CudaBackendOptions options;
  options.device = device;
  options.replica = replica;
  options.workspace_bytes = choice.workspace_bytes;
  options.memory_limit_bytes = choice.memory_limit_bytes;
  options.memory_reserve_bytes = choice.memory_reserve_bytes;
  options.teacher_pool_bytes = choice.teacher_pool_bytes;
  options.deterministic = choice.deterministic;
  options.stream_priority = PriorityOf(choice);
  options.shares_process = choice.shares_process;
  return CreateCudaBackend(options);
}

absl::StatusOr<std::unique_ptr<Backend>> CreateGroup(const BackendChoice& choice,
                                                     const std::vector<int>& devices) {
  std::vector<std::unique_ptr<Backend>> members;
  std::vector<std::string> descriptions;
  for (const int device : devices) {
    const Replica replica{static_cast<int>(members.size()), static_cast<int>(devices.size())};
    absl::StatusOr<std::unique_ptr<Backend>> member = CreateOne(choice, device, replica);
    if (!member.ok()) return member.status();
    descriptions.push_back((*member)->info().device);
    members.push_back(*std::move(member));
  }
  if (absl::Status status = CheckAlike(descriptions); !status.ok()) return status;
  absl::StatusOr<std::unique_ptr<CudaReplicaGroup>> connection =
      CudaReplicaGroup::Create(devices, choice.link_timeout);
  if (!connection.ok()) return connection.status();
  const std::shared_ptr<CudaReplicaGroup> group = *std::move(connection);
  return CreateGroupBackend(
      std::move(members),
      [group](absl::Span<HeadKernels* const> heads) -> absl::StatusOr<std::unique_ptr<Replicas>> {
        return group->Connect(heads);
      },
      {.split = *SplitOf(choice),
       .replicas = choice.replicas,
       .join_classes = [group](absl::Span<HeadKernels* const> heads) { return group->Join(heads); },
       .exchanges = group->exchanges(),
       .member_of =
           [devices](const void* memory) {
             const auto found = std::find(devices.begin(), devices.end(), GpuOf(memory));
             return found == devices.end() ? -1 : static_cast<int>(found - devices.begin());
           }});
}

// The index of the GPU for a backend with one GPU.
absl::StatusOr<int> DeviceOf(const BackendChoice& choice, const std::vector<std::string>& uuids) {
  const bool named = choice.device != BackendChoice().device;
  if (named || !choice.local_rank.has_value() || uuids.size() == 1) return FindGpu(choice.device, uuids);
  return FindGpu(absl::StrCat(*choice.local_rank), uuids);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> CreateGpuBackend(const BackendChoice& choice) {
  const absl::StatusOr<std::vector<std::string>> uuids = VisibleGpuUuids();
  if (!uuids.ok()) return uuids.status();
  if (!choice.devices.empty()) {
    const absl::StatusOr<std::vector<int>> devices = FindGpus(choice.devices, *uuids);
    if (!devices.ok()) return devices.status();
    return devices->size() == 1 ? CreateOne(choice, devices->front(), Replica())
                                : CreateGroup(choice, *devices);
  }
  const absl::StatusOr<int> device = DeviceOf(choice, *uuids);
  if (!device.ok()) return device.status();
  return CreateOne(choice, *device, choice.replica);
}

absl::StatusOr<std::vector<std::string>> GpuUuidsOf(const std::string& devices) {
  const absl::StatusOr<std::vector<std::string>> uuids = VisibleGpuUuids();
  if (!uuids.ok()) return uuids.status();
  const absl::StatusOr<std::vector<int>> found = FindGpus(devices, *uuids);
  if (!found.ok()) return found.status();
  std::vector<std::string> named;
  for (const int index : *found) named.push_back((*uuids)[static_cast<size_t>(index)]);
  return named;
}

absl::StatusOr<std::unique_ptr<RankLink>> CreateGpuLink(const BackendChoice& choice, Backend* backend) {
  const absl::StatusOr<std::vector<std::string>> uuids = VisibleGpuUuids();
  if (!uuids.ok()) return uuids.status();
  const absl::StatusOr<int> device = DeviceOf(choice, *uuids);
  if (!device.ok()) return device.status();
  return CreateCudaLink(
      {.device = *device,
       .replica = choice.replica,
       .timeout = choice.link_timeout,
       .collectives = choice.collectives,
       .make_transfers =
           [&choice] { return CreateGlooTransfers(choice.replica, choice.link_host, choice.link_timeout); },
       .plan_memory =
           [backend](int64_t bytes) { return backend->PlanHostMemory(MemoryKind::kStaging, bytes); }});
}

}  // namespace lossd::kernels
