// SPDX-License-Identifier: Apache-2.0
// The commands heads, describe, create, delete, reset and shares, which options.h declares. This header has
// the functions that tests call directly: they balance the shares of a head that is split by vocabulary, so
// that all devices of a server finish together although each has other work beside the head.
// lossd.torch.balance() has the same formula (docs/scaling.md says how to use both).
//
// It is shorter than 60 lines because main.cc calls the commands alone. Pure functions; thread-safe.
#ifndef LOSSD_CLIENT_CLI_HEAD_COMMANDS_H_
#define LOSSD_CLIENT_CLI_HEAD_COMMANDS_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace lossd::cli {

// What was measured on one device for the rows of one microbatch.
struct DeviceLoad {
  int64_t classes = 0;
  double head_seconds = 0;   // for its classes, without the time that it waits for other devices
  double stage_seconds = 0;  // for its other work
};

// The share of each device, in thousandths. A device whose other work takes L seconds and each of whose
// classes takes k seconds gets (T - L) / k classes, or none if L > T. T is chosen so that these are all
// classes. For a device without classes, k is the mean over all devices. At least one of `devices` has
// classes, and took time for them.
std::vector<uint32_t> BalancedShares(absl::Span<const DeviceLoad> devices);

// The seconds that `device` takes for the same rows if it has `share` of `whole` shares of the classes.
double SecondsWith(const DeviceLoad& device, absl::Span<const DeviceLoad> all, uint32_t share,
                   uint32_t whole);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_HEAD_COMMANDS_H_
