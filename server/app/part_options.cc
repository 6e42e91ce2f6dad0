// SPDX-License-Identifier: Apache-2.0
#include "server/app/part_options.h"

#include <utility>

#include "kernels/group/group_backend.h"
#include "server/app/check_options.h"
#include "server/app/rank_families.h"
#include "server/ranks/local_address.h"

namespace lossd::app {

engine::EngineOptions EngineOptionsOf(const ServerOptions& options) {
  engine::EngineOptions out;
  out.slice_bytes = options.slice_bytes;
  out.staging_bytes = options.staging_bytes;
  out.retained_bytes = options.retained_bytes;
  out.deterministic = options.deterministic;
  out.max_streams = options.max_streams;
  out.max_heads = options.max_heads;
  out.ledger_bytes = LedgerBytes(options);
  out.peer_share = options.peer_share;
  return out;
}

rpc::TransportOptions TransportOf(const ServerOptions& options) {
  rpc::TransportOptions transport = options.transport;
  transport.max_message_bytes = MaxMessageBytes(options);
  transport.bytes = TransportBytes(options);
  if (options.security.tls_client_ca.empty()) transport.connection_age = absl::InfiniteDuration();
  return transport;
}

rpc::HeadServiceOptions HeadServiceOptionsOf(const ServerOptions& options,
                                             const kernels::BackendInfo& backend, regions::Regions* regions,
                                             head::FileSites* sites) {
  rpc::HeadServiceOptions out;
  out.operations.checkpoints.sites = sites;
  out.operations.checkpoints.directory = options.checkpoint_directory;
  out.operations.checkpoints.buffer_bytes = options.checkpoint_buffer_bytes;
  out.operations.checkpoints.shards = {.most_bytes = options.checkpoint_shard_bytes,
                                       .threads = CheckpointThreads(options, backend)};
  out.operations.checkpoints.memory_reserve_bytes = options.memory_reserve_bytes;
  out.operations.checkpoints.keep = options.keep_checkpoints;
  out.operations.checkpoints.limit_bytes = options.checkpoint_limit_bytes;
  out.operations.default_compute_dtype = backend.default_compute_dtype;
  out.max_waiting_calls = options.max_waiting_calls;
  out.max_tensor_calls = options.max_tensor_calls;
  out.max_saves = options.max_saves;
  out.peer_share = options.peer_share;
  out.timeouts = options.timeouts;
  out.regions = regions;
  return out;
}

rpc::LossServiceOptions LossServiceOptionsOf(const ServerOptions& options, regions::Regions* regions) {
  return {.max_streams = options.max_streams,
          .max_staging_bytes = 8 * options.slice_bytes,
          .peer_share = options.peer_share,
          .timeouts = options.timeouts,
          .retained_timeout = options.retained_timeout,
          .regions = regions};
}

std::vector<metrics::RankReading> RanksOf(const ranks::Leader* leader) {
  std::vector<metrics::RankReading> readings;
  if (leader == nullptr) return readings;
  for (ranks::RankReport& report : leader->Reports()) {
    const bool is_leader = report.state.rank == 0;
    readings.push_back({.state = std::move(report.state),
                        .metrics = is_leader ? metrics::RankTimeFamilies(leader->times())
                                             : metrics::FromPlain(FromProto(report.metrics))});
  }
  return readings;
}

std::vector<metrics::RankReading> RanksOf(const ranks::Leader* leader, const kernels::Backend& backend) {
  if (leader != nullptr) return RanksOf(leader);
  std::vector<metrics::RankReading> readings;
  const auto* const group = dynamic_cast<const kernels::GroupMembers*>(&backend);
  if (group == nullptr) return readings;
  for (kernels::MemberState& member : group->MemberStates()) {
    readings.push_back({.state = {.rank = static_cast<int>(readings.size()),
                                  .host = ranks::HostName(),
                                  .device = std::move(member.device),
                                  .memory = member.memory,
                                  .chunks = member.work.chunks,
                                  .rows = member.work.rows},
                        .metrics = metrics::RankTimeFamilies({member.work.busy, member.exchanges})});
  }
  return readings;
}

}  // namespace lossd::app
