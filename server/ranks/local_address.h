// SPDX-License-Identifier: Apache-2.0
// What this host is called, and at which of its addresses the others reach it.
//
// Stateless; thread-safe.
#ifndef LOSSD_SERVER_RANKS_LOCAL_ADDRESS_H_
#define LOSSD_SERVER_RANKS_LOCAL_ADDRESS_H_

#include <string>

#include "absl/status/statusor.h"

namespace lossd::ranks {

// The address of this host from which `host` is reached; of `host` itself, where that is this one, an address
// that others reach. A loopback address only if `host` is one. UNAVAILABLE if the name cannot be resolved.
absl::StatusOr<std::string> LocalAddressFor(const std::string& host);

// For people; "unknown" if the system does not say.
std::string HostName();

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_LOCAL_ADDRESS_H_
