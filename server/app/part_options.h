// SPDX-License-Identifier: Apache-2.0
// The options of a server's parts, as they follow from the server's own, and what its metrics read.
//
// Stateless; thread-safe.
#ifndef LOSSD_SERVER_APP_PART_OPTIONS_H_
#define LOSSD_SERVER_APP_PART_OPTIONS_H_

#include <memory>
#include <vector>

#include "absl/time/time.h"
#include "kernels/backend.h"
#include "server/app/server.h"
#include "server/engine/engine_options.h"
#include "server/metrics/rank_metrics.h"
#include "server/ranks/leader.h"
#include "server/rpc/head_service.h"
#include "server/rpc/loss_service.h"
#include "server/rpc/transport.h"

namespace lossd::app {

engine::EngineOptions EngineOptionsOf(const ServerOptions& options);

// Only connections with client certificates get old: a token is looked at with every call.
rpc::TransportOptions TransportOf(const ServerOptions& options);

// In both, `regions` is null if the server shares no memory. `sites`: CheckpointOptions::sites.
rpc::HeadServiceOptions HeadServiceOptionsOf(const ServerOptions& options,
                                             const kernels::BackendInfo& backend, regions::Regions* regions,
                                             head::FileSites* sites);
rpc::LossServiceOptions LossServiceOptionsOf(const ServerOptions& options, regions::Regions* regions);

// Of a part that shows signs of life; zero where there is none.
template <typename Part>
absl::Duration SilenceOf(const std::unique_ptr<Part>& part) {
  return part == nullptr ? absl::ZeroDuration() : part->Silence();
}

// None without a leader.
std::vector<metrics::RankReading> RanksOf(const ranks::Leader* leader);
// Without a leader the devices of the process, numbered as ranks; none if it has one device.
std::vector<metrics::RankReading> RanksOf(const ranks::Leader* leader, const kernels::Backend& backend);

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_PART_OPTIONS_H_
