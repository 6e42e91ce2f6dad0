// SPDX-License-Identifier: Apache-2.0
#include "server/app/compute.h"

#include <string>
#include <utility>

#include "kernels/nccl_environment.h"
#include "server/app/check_options.h"
#include "server/app/rank_parts.h"
#include "server/log/log.h"

namespace lossd::app {
namespace {

bool MayUseNccl(const ServerOptions& options, const kernels::BackendInfo& backend) {
  if (backend.uuids.size() > 1) return true;
  return options.ranks.several() && !backend.uuids.empty() && options.ranks.collectives != kernels::kGloo;
}

// Of a process alone. GPUs take NCCL; CPU devices are threads with one memory.
std::string CollectivesOf(const ServerOptions& options, const kernels::BackendInfo& backend) {
  if (backend.uuids.size() > 1) return kernels::kNccl;
  return backend.name == "cpu" && options.cpu_devices > 1 ? "threads" : "";
}

absl::StatusOr<Backends> CreateOne(const ServerOptions& options) {
  absl::StatusOr<kernels::CreatedBackend> one = kernels::CreateBackend(BackendOf(options));
  if (!one.ok()) return one.status();
  Backends backends;
  backends.push_back(*std::move(one));
  return backends;
}

absl::StatusOr<Backends> CreateOneForEachRank(const ServerOptions& options) {
  kernels::BackendChoice choice = BackendOf(options);
  absl::StatusOr<std::string> host = RankHost(options);
  if (!host.ok()) return host.status();
  choice.link_host = *std::move(host);
  return kernels::CreateRankBackends(choice);
}

}  // namespace

absl::StatusOr<Backends> CreateOwnBackends(const ServerOptions& options) {
  absl::StatusOr<Backends> own = options.ranks.several() ? CreateOneForEachRank(options) : CreateOne(options);
  if (!own.ok()) return own.status();
  if (absl::Status status = CheckRankCount(options, static_cast<int>(own->size())); !status.ok())
    return status;
  const kernels::CreatedBackend& first = own->front();
  if (!first.note.empty()) log::Log(log::LogLevel::kInfo, "no GPU backend", {{"reason", first.note}});
  if (MayUseNccl(options, first.backend->info())) {
    log::Log(log::LogLevel::kInfo, "settings of NCCL", {{kernels::kNcclMulticast, kernels::NcclMulticast()}});
  }
  return own;
}

absl::StatusOr<Compute> CreateCompute(const ServerOptions& options,
                                      const std::shared_ptr<grpc::ServerCredentials>& credentials) {
  absl::StatusOr<Backends> own = CreateOwnBackends(options);
  if (!own.ok()) return own.status();
  kernels::CreatedBackend first = std::move(own->front());
  Compute compute;
  if (!options.ranks.several()) {
    compute.collectives = CollectivesOf(options, first.backend->info());
    compute.backend = std::move(first.backend);
    return compute;
  }
  const auto devices = static_cast<int>(own->size());
  absl::StatusOr<std::unique_ptr<ranks::Leader>> leader = StartLeader(options, devices, credentials);
  if (!leader.ok()) return leader.status();
  compute.leader = *std::move(leader);
  if (devices > 1) {
    own->erase(own->begin());
    absl::StatusOr<std::unique_ptr<LocalRanks>> others = LocalRanks::Start(
        options, *std::move(own),
        {.first_rank = 1, .devices = devices, .local_address = compute.leader->local_address()});
    if (!others.ok()) return others.status();
    compute.other_devices = *std::move(others);
  }
  absl::StatusOr<std::unique_ptr<kernels::Backend>> backend = compute.leader->Form(std::move(first));
  if (!backend.ok()) return backend.status();
  compute.collectives = compute.leader->collectives();
  compute.backend = *std::move(backend);
  return compute;
}

}  // namespace lossd::app
