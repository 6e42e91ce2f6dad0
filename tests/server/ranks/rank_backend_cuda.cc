// SPDX-License-Identifier: Apache-2.0
#include "absl/strings/match.h"
#include "kernels/cpu/gloo_link.h"
#include "kernels/cuda/cuda_backend.h"
#include "tests/server/ranks/rank_backend.h"

namespace lossd::ranks::testing {

using kernels::FusedLoss;

int VisibleGpus() {
  const auto uuids = kernels::VisibleGpuUuids();
  return uuids.ok() ? static_cast<int>(uuids->size()) : 0;
}

absl::StatusOr<kernels::CreatedBackend> MakeRankBackend(const RankSpec& spec) {
  const int gpus = VisibleGpus();
  kernels::BackendChoice choice = ChoiceOf(spec);
  if (choice.backend != "cuda" || gpus == 0) return kernels::CreateBackend(choice);
  choice.local_rank = spec.rank % gpus;
  if (spec.way.empty()) return kernels::CreateBackend(choice);
  kernels::CudaBackendOptions options = {.device = *choice.local_rank,
                                         .replica = choice.replica,
                                         .workspace_bytes = choice.workspace_bytes,
                                         .max_chunk_rows = 512};
  options.fused_loss = absl::StartsWith(spec.way, "unfused") ? FusedLoss::kNever : FusedLoss::kWherePossible;
  options.host_branches = absl::StrContains(spec.way, "+host_branches");
  options.smallest_blocks = absl::StrContains(spec.way, "+blocks");
  auto backend = kernels::CreateCudaBackend(options);
  if (!backend.ok()) return backend.status();
  auto link = kernels::CreateCudaLink({.device = options.device,
                                       .replica = options.replica,
                                       .timeout = choice.link_timeout,
                                       .collectives = choice.collectives,
                                       .make_transfers = [&choice] {
                                         return kernels::CreateGlooTransfers(choice.replica, choice.link_host,
                                                                             choice.link_timeout);
                                       }});
  if (!link.ok()) return link.status();
  return kernels::CreatedBackend{.backend = *std::move(backend), .link = *std::move(link), .note = ""};
}

}  // namespace lossd::ranks::testing
