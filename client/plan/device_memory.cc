// SPDX-License-Identifier: Apache-2.0
#include "client/plan/device_memory.h"

#include "client/plan/plan.h"
#include "kernels/cuda/heads/head_plan.h"

namespace lossd::plan {
namespace {

using kernels::MemoryKind;

kernels::cuda::PlanDevice DeviceOf(const Card& card, kernels::Replica replica) {
  kernels::cuda::PlanDevice device;
  device.limits.multiprocessors = card.multiprocessors;
  device.limits.has_clusters = card.clusters > 0;
  device.limits.is_hopper = card.clusters > 0;
  device.limits.fused_clusters = card.clusters;
  device.limits.has_branches = true;
  device.replica = replica;
  return device;
}

kernels::HeadConfig ConfigOf(const Request& r, const Placement& placement) {
  return {.hidden_size = r.model.hidden,
          .vocab_size = r.model.vocab,
          .has_bias = r.bias,
          .norm = r.norm,
          .compute_dtype = kernels::DType::kBFloat16,
          .optimizer_state = r.optimizer_state,
          .logits = placement.logits,
          .workspace_bytes = r.workspace_bytes,
          .split = placement.split,
          .shares = placement.shares};
}

}  // namespace

absl::StatusOr<DeviceMemory> DeviceMemoryOf(const Request& request, const Card& card,
                                            const Placement& placement, kernels::Replica replica) {
  const absl::StatusOr<kernels::cuda::HeadPlan> plan =
      kernels::cuda::PlanHead(ConfigOf(request, placement), DeviceOf(card, replica));
  if (!plan.ok()) return plan.status();
  DeviceMemory device;
  device.logits = placement.logits;
  device.split = placement.split;
  device.memory = plan->memory;
  device.library_bytes = kernels::cuda::kGemmWorkspaceBytes;
  device.device_bytes = plan->memory.Total() - plan->memory[MemoryKind::kStaging] -
                        plan->memory[MemoryKind::kLedger] + device.library_bytes;
  device.chunk_rows = plan->sizes.chunk_rows;
  device.fits = device.device_bytes <= request.memory_bytes;
  device.choices = plan->choices;
  return device;
}

}  // namespace lossd::plan
