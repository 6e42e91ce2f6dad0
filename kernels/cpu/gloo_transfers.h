// SPDX-License-Identifier: Apache-2.0
// Makes the HostTransfers that carry memory of the host between processes over TCP, by Gloo.
#ifndef LOSSD_KERNELS_CPU_GLOO_TRANSFERS_H_
#define LOSSD_KERNELS_CPU_GLOO_TRANSFERS_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/replica.h"

namespace lossd::kernels {

// Whether this build has Gloo.
bool HaveGloo();

// `host`: the address of this host that the other ranks reach; a name or an IP address. `timeout`: how long
// one rank waits for another. UNAVAILABLE in a build without Gloo. Connections are neither encrypted nor
// authenticated.
absl::StatusOr<std::unique_ptr<HostTransfers>> CreateGlooTransfers(Replica replica, const std::string& host,
                                                                   absl::Duration timeout);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_GLOO_TRANSFERS_H_
