// SPDX-License-Identifier: Apache-2.0
// Creates CPU backends, and GPU backends through CreateGpuBackend, with their groups and links
// (create_backend.h).
#include "kernels/create_backend.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/gloo_link.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"
#include "kernels/group/group_backend.h"

namespace lossd::kernels {
namespace {

absl::StatusOr<std::unique_ptr<Backend>> CreateCpuGroup(const CpuBackendOptions& options,
                                                        const BackendChoice& choice) {
  absl::StatusOr<std::vector<std::unique_ptr<Backend>>> members =
      CreateCpuMembers(options, choice.cpu_devices);
  if (!members.ok()) return members.status();
  const auto clocks = std::make_shared<MemberExchanges>(choice.cpu_devices);
  const auto join = [clocks](absl::Span<HeadKernels* const> heads) {
    return JoinTimedCpuClasses(heads, clocks);
  };
  return CreateGroupBackend(*std::move(members), MakeCpuReplicas,
                            {.members_share_memory = true,
                             .split = *SplitOf(choice),
                             .replicas = choice.replicas,
                             .join_classes = join,
                             .exchanges = clocks});
}

absl::StatusOr<CreatedBackend> CreateCpu(const BackendChoice& choice, std::string note) {
  CpuBackendOptions options;
  options.threads = choice.threads;
  if (choice.workspace_bytes > 0) options.workspace_bytes = choice.workspace_bytes;
  options.memory_limit_bytes = choice.memory_limit_bytes;
  options.memory_reserve_bytes = choice.memory_reserve_bytes;
  options.teacher_pool_bytes = choice.teacher_pool_bytes;
  options.replica = choice.replica;
  if (choice.replica.count > 1) options.sharers = choice.cpu_devices;
  absl::StatusOr<std::unique_ptr<Backend>> backend = choice.cpu_devices == 1 || choice.replica.count > 1
                                                         ? CreateCpuBackend(options)
                                                         : CreateCpuGroup(options, choice);
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

// Checks `replica`, and that a backend with a link has one device.
absl::Status CheckReplica(const BackendChoice& choice) {
  const Replica replica = choice.replica;
  if (replica.count < 1) return errors::FieldError("replica.count", "be >= 1", replica.count);
  if (replica.index < 0 || replica.index >= replica.count) {
    return errors::FieldError("replica.index", absl::StrCat("be in [0, ", replica.count, ")"), replica.index);
  }
  if (replica.count == 1 || choice.devices.empty()) return absl::OkStatus();
  return errors::FieldError("devices", "be empty for one of several replicas", choice.devices);
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
  LOSSD_RETURN_IF_ERROR(SplitOf(choice).status());
  const bool one_device = choice.cpu_devices == 1 && choice.devices.empty();
  if (choice.replicas >= 1 && (choice.replicas == 1 || !one_device)) return absl::OkStatus();
  return errors::FieldError("replicas", "be at least 1, and 1 on one device", choice.replicas);
}

// The choice for device `index` of the `count` devices of a process.
BackendChoice ChoiceOf(const BackendChoice& process, int index, int count) {
  BackendChoice choice = process;
  choice.replica = {process.replica.index * count + index, process.replica.count * count};
  return choice;
}

absl::StatusOr<std::vector<CreatedBackend>> CreateAll(const std::vector<BackendChoice>& choices) {
  std::vector<CreatedBackend> created;
  for (const BackendChoice& choice : choices) {
    absl::StatusOr<CreatedBackend> one = CreateBackend(choice);
    if (!one.ok()) return one.status();
    created.push_back(*std::move(one));
  }
  return created;
}

absl::StatusOr<std::vector<CreatedBackend>> CreateOnGpus(const BackendChoice& process) {
  const absl::StatusOr<std::vector<std::string>> gpus = GpuUuidsOf(process.devices);
  if (!gpus.ok()) return gpus.status();
  std::vector<BackendChoice> choices;
  for (const std::string& gpu : *gpus) {
    choices.push_back(ChoiceOf(process, static_cast<int>(choices.size()), static_cast<int>(gpus->size())));
    choices.back().devices.clear();
    choices.back().device = gpu;
  }
  return CreateAll(choices);
}

}  // namespace

absl::StatusOr<Split> SplitOf(const BackendChoice& choice) {
  for (const Split split : {Split::kAny, Split::kRows, Split::kVocabulary}) {
    if (choice.split == Name(split)) return split;
  }
  return errors::FieldError("split", "be any, rows or vocabulary", choice.split);
}

absl::StatusOr<CreatedBackend> CreateBackend(const BackendChoice& choice) {
  absl::Status status = Check(choice);
  status.Update(CheckReplica(choice));
  if (!status.ok()) return status;
  if (choice.backend == "cpu") return CreateCpu(choice, "");
  absl::StatusOr<std::unique_ptr<Backend>> gpu = CreateGpuBackend(choice);
  if (gpu.ok()) return WithGpuLink(choice, *std::move(gpu));
  const bool wants_gpu = choice.backend == "cuda" || !choice.devices.empty();
  if (wants_gpu || !absl::IsUnavailable(gpu.status())) return gpu.status();
  return CreateCpu(choice, std::string(gpu.status().message()));
}

absl::StatusOr<std::vector<CreatedBackend>> CreateRankBackends(const BackendChoice& choice) {
  LOSSD_RETURN_IF_ERROR(Check(choice));
  if (!choice.devices.empty()) return CreateOnGpus(choice);
  // Creates one backend first, because "auto" may choose a GPU, and then `cpu_devices` does not count.
  BackendChoice one = choice;
  one.cpu_devices = 1;
  absl::StatusOr<std::vector<CreatedBackend>> first = CreateAll({one});
  if (!first.ok() || choice.cpu_devices <= 1 || first->front().backend->info().name != "cpu") return first;
  std::vector<BackendChoice> choices;
  for (int i = 0; i < choice.cpu_devices; ++i) {
    choices.push_back(ChoiceOf(choice, i, choice.cpu_devices));
    choices.back().backend = "cpu";
  }
  absl::StatusOr<std::vector<CreatedBackend>> all = CreateAll(choices);
  if (all.ok()) all->front().note = first->front().note;
  return all;
}

}  // namespace lossd::kernels
