// SPDX-License-Identifier: Apache-2.0
// Exchanges between processes over TCP, with the library Gloo. CreateGlooLink makes the RankLink of a CPU
// backend, which connects replicas and parts of heads. CreateGlooTransfers makes HostTransfers, which carry
// host memory for any backend.
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

// `host`: the address of this host at which other ranks reach it; a name or an IP address. `timeout`: how
// long one rank waits for another. UNAVAILABLE in a build without Gloo.
//
// Sums are added in the order of the ranks, so they have the same bits as with as many devices in one process
// (cpu_backend.h). Connections are neither encrypted nor authenticated.
absl::StatusOr<std::unique_ptr<RankLink>> CreateGlooLink(Replica replica, const std::string& host,
                                                         absl::Duration timeout);

// Whether this build has Gloo.
bool HaveGloo();
// `host`, `timeout` and connections as for CreateGlooLink. UNAVAILABLE in a build without Gloo.
absl::StatusOr<std::unique_ptr<HostTransfers>> CreateGlooTransfers(Replica replica, const std::string& host,
                                                                   absl::Duration timeout);

// The host memory that a link of CreateGlooLink uses once it is connected, for all heads together.
int64_t GlooLinkBytes(Replica replica);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_GLOO_LINK_H_
