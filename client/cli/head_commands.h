// SPDX-License-Identifier: Apache-2.0
// The commands heads, describe, create, delete, reset and shares, which options.h declares. What tests call
// by itself is the balance of shares: which shares of a head's classes let the devices of a server, each with
// work of its own beside the head, end together. lossd.torch.balance() has the same formula (docs/scaling.md
// says how to use both).
//
// It is shorter than 60 lines because main.cc calls the commands alone. Pure functions; thread-safe.
#ifndef LOSSD_CLIENT_CLI_HEAD_COMMANDS_H_
#define LOSSD_CLIENT_CLI_HEAD_COMMANDS_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace lossd::cli {

// What a device was measured to do for the rows of one microbatch.
struct DeviceLoad {
  int64_t classes = 0;
  double head_seconds = 0;   // for its classes, without what it waits for other devices
  double stage_seconds = 0;  // beside the head
};

// In thousandths. A device with load L whose classes take k seconds each gets (T - L) / k classes, or none if
// L is above T; T is where these are all classes. k of a device without classes is that of all devices
// together. `devices`: some of them have classes, and took time for them.
std::vector<uint32_t> BalancedShares(absl::Span<const DeviceLoad> devices);

// Of a device with that load that would have `share` of `whole`: seconds for the same rows.
double SecondsWith(const DeviceLoad& device, absl::Span<const DeviceLoad> all, uint32_t share,
                   uint32_t whole);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_HEAD_COMMANDS_H_
