// SPDX-License-Identifier: Apache-2.0
// Exchanges between processes over TCP, by Gloo: CreateGlooLink makes the RankLink of a CPU backend, which
// connects the replicas of heads with sums and copies, and CreateGlooTransfers the HostTransfers that carry
// memory of the host for any backend.
#ifndef LOSSD_KERNELS_CPU_GLOO_LINK_H_
#define LOSSD_KERNELS_CPU_GLOO_LINK_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/rank_link.h"
#include "kernels/replica.h"

namespace lossd::kernels {

// `host`: the address of this host that the other ranks reach; a name or an IP address. `timeout`: how long
// one rank waits for another. UNAVAILABLE in a build without Gloo.
//
// Sums are formed in the order of the ranks, so that their bits are those of as many devices in one process
// (cpu_backend.h). Connections are neither encrypted nor authenticated.
absl::StatusOr<std::unique_ptr<RankLink>> CreateGlooLink(Replica replica, const std::string& host,
                                                         absl::Duration timeout);

// Whether this build has Gloo.
bool HaveGloo();
// `host` and `timeout` as above, and the same of connections. UNAVAILABLE in a build without Gloo.
absl::StatusOr<std::unique_ptr<HostTransfers>> CreateGlooTransfers(Replica replica, const std::string& host,
                                                                   absl::Duration timeout);

// What a link of CreateGlooLink takes of the host's memory once it is connected, for all heads together.
int64_t GlooLinkBytes(Replica replica);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_GLOO_LINK_H_
