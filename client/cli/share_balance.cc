// SPDX-License-Identifier: Apache-2.0
#include "client/cli/share_balance.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

namespace lossd::cli {
namespace {

constexpr double kWhole = 1000.0;  // the sum of the shares, but for rounding

double ClassesOf(absl::Span<const DeviceLoad> devices) {
  double classes = 0;
  for (const DeviceLoad& device : devices) classes += static_cast<double>(device.classes);
  return classes;
}

// Seconds of a class.
double CostOf(const DeviceLoad& device, absl::Span<const DeviceLoad> all) {
  if (device.classes > 0 && device.head_seconds > 0) {
    return device.head_seconds / static_cast<double>(device.classes);
  }
  double seconds = 0;
  for (const DeviceLoad& each : all) seconds += each.head_seconds;
  return seconds / ClassesOf(all);
}

}  // namespace

std::vector<uint32_t> BalancedShares(absl::Span<const DeviceLoad> devices) {
  std::vector<size_t> order(devices.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return devices[a].stage_seconds < devices[b].stage_seconds;
  });
  const double classes = ClassesOf(devices);
  // The devices with the least load take part, as many as end below the load of the next.
  double level = 0, rates = 0, done = 0;
  for (size_t n = 0; n < order.size(); ++n) {
    const DeviceLoad& device = devices[order[n]];
    const double rate = 1.0 / CostOf(device, devices);
    rates += rate;
    done += device.stage_seconds * rate;
    level = (classes + done) / rates;
    if (n + 1 == order.size() || level <= devices[order[n + 1]].stage_seconds) break;
  }
  std::vector<uint32_t> shares;
  for (const DeviceLoad& device : devices) {
    const double part = std::max(0.0, level - device.stage_seconds) / CostOf(device, devices) / classes;
    shares.push_back(static_cast<uint32_t>(std::lround(kWhole * part)));
  }
  return shares;
}

double SecondsWith(const DeviceLoad& device, absl::Span<const DeviceLoad> all, uint32_t share,
                   uint32_t whole) {
  return device.stage_seconds + ClassesOf(all) * share / whole * CostOf(device, all);
}

}  // namespace lossd::cli
