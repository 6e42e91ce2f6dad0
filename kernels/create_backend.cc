// SPDX-License-Identifier: Apache-2.0
#include "kernels/create_backend.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/cpu_classes.h"
#include "kernels/cpu/cpu_replicas.h"
#include "kernels/cpu/gloo_link.h"
#include "kernels/errors/field_error.h"
#include "kernels/gpu_backend.h"
#include "kernels/group/group_backend.h"

namespace lossd::kernels {
namespace {

absl::StatusOr<std::unique_ptr<Backend>> CreateCpuGroup(const CpuBackendOptions& options,
                                                        const BackendChoice& choice) {
  absl::StatusOr<std::vector<std::unique_ptr<Backend>>> members =
      CreateCpuMembers(options, choice.cpu_devices);
  if (!members.ok()) return members.status();
  return CreateGroupBackend(
      *std::move(members), MakeCpuReplicas,
      {.members_share_memory = true, .split = *SplitOf(choice), .join_classes = JoinCpuClasses});
}

absl::StatusOr<CreatedBackend> CreateCpu(const BackendChoice& choice, std::string note) {
  CpuBackendOptions options;
  options.threads = choice.threads;
  if (choice.workspace_bytes > 0) options.workspace_bytes = choice.workspace_bytes;
  options.memory_limit_bytes = choice.memory_limit_bytes;
  options.memory_reserve_bytes = choice.memory_reserve_bytes;
  options.replica = choice.replica;
  absl::StatusOr<std::unique_ptr<Backend>> backend =
      choice.cpu_devices == 1 ? CreateCpuBackend(options) : CreateCpuGroup(options, choice);
  if (!backend.ok()) return backend.status();
  CreatedBackend created{.backend = *std::move(backend), .link = nullptr, .note = std::move(note)};
  if (choice.replica.count == 1) return created;
  if (choice.collectives == kNccl) {
    return errors::FieldError("collectives", "be auto or gloo on CPUs", choice.collectives);
  }
  absl::Status planned =
      created.backend->PlanHostMemory(MemoryKind::kWorkspace, GlooLinkBytes(choice.replica));
  if (!planned.ok()) return planned;
  absl::StatusOr<std::unique_ptr<RankLink>> link =
      CreateGlooLink(choice.replica, choice.link_host, choice.link_timeout);
  if (!link.ok()) return link.status();
  created.link = *std::move(link);
  return created;
}

absl::StatusOr<CreatedBackend> WithGpuLink(const BackendChoice& choice, std::unique_ptr<Backend> backend) {
  CreatedBackend created{.backend = std::move(backend), .link = nullptr, .note = ""};
  if (choice.replica.count == 1) return created;
  absl::StatusOr<std::unique_ptr<RankLink>> link = CreateGpuLink(choice, created.backend.get());
  if (!link.ok()) return link.status();
  created.link = *std::move(link);
  return created;
}

// One of several processes has one device.
absl::Status CheckReplica(const BackendChoice& choice) {
  const Replica replica = choice.replica;
  if (replica.count < 1) return errors::FieldError("replica.count", "be >= 1", replica.count);
  if (replica.index < 0 || replica.index >= replica.count) {
    return errors::FieldError("replica.index", absl::StrCat("be in [0, ", replica.count, ")"), replica.index);
  }
  if (replica.count == 1) return absl::OkStatus();
  if (!choice.devices.empty()) {
    return errors::FieldError("devices", "be empty with several ranks, of which each has one device",
                              choice.devices);
  }
  if (choice.cpu_devices != 1) {
    return errors::FieldError("cpu_devices", "be 1 with several ranks, of which each has one device",
                              choice.cpu_devices);
  }
  return absl::OkStatus();
}

absl::Status Check(const BackendChoice& choice) {
  if (choice.backend != "auto" && choice.backend != "cuda" && choice.backend != "cpu") {
    return errors::FieldError("backend", "be auto, cpu or cuda", choice.backend);
  }
  if (!choice.devices.empty() && choice.backend == "cpu") {
    return errors::FieldError("devices", "be empty with backend cpu, which has cpu_devices", choice.devices);
  }
  if (!choice.devices.empty() && choice.device != BackendChoice().device) {
    return errors::FieldError("devices", absl::StrCat("be empty where device is given, ", choice.device),
                              choice.devices);
  }
  if (choice.cpu_devices != 1 && choice.backend == "cuda") {
    return errors::FieldError("cpu_devices", "be 1 with backend cuda, which has devices", choice.cpu_devices);
  }
  if (choice.collectives != "auto" && choice.collectives != kNccl && choice.collectives != kGloo) {
    return errors::FieldError("collectives", "be auto, nccl or gloo", choice.collectives);
  }
  if (absl::Status status = SplitOf(choice).status(); !status.ok()) return status;
  return CheckReplica(choice);
}

}  // namespace

absl::StatusOr<Split> SplitOf(const BackendChoice& choice) {
  for (const Split split : {Split::kAny, Split::kRows, Split::kVocabulary}) {
    if (choice.split == Name(split)) return split;
  }
  return errors::FieldError("split", "be any, rows or vocabulary", choice.split);
}

absl::StatusOr<CreatedBackend> CreateBackend(const BackendChoice& choice) {
  if (absl::Status status = Check(choice); !status.ok()) return status;
  if (choice.backend == "cpu") return CreateCpu(choice, "");
  absl::StatusOr<std::unique_ptr<Backend>> gpu = CreateGpuBackend(choice);
  if (gpu.ok()) return WithGpuLink(choice, *std::move(gpu));
  const bool wants_gpu = choice.backend == "cuda" || !choice.devices.empty();
  if (wants_gpu || !absl::IsUnavailable(gpu.status())) return gpu.status();
  return CreateCpu(choice, std::string(gpu.status().message()));
}

}  // namespace lossd::kernels
