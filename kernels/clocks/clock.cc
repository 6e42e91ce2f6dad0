// SPDX-License-Identifier: Apache-2.0
#include "kernels/clocks/clock.h"

#include <atomic>
#include <chrono>
#include <cstdint>

#include "absl/time/clock.h"

namespace lossd::clocks {
namespace {

std::atomic<int64_t> wall_ahead_ns{0};

}  // namespace

absl::Time SteadyNow() {
  return absl::UnixEpoch() + absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
}

absl::Time WallNow() {
  return absl::Now() + absl::Nanoseconds(wall_ahead_ns.load(std::memory_order_relaxed));
}

absl::Time OnTheWall(absl::Time steady) {
  if (steady == absl::InfiniteFuture() || steady == absl::InfinitePast()) return steady;
  return WallNow() + (steady - SteadyNow());
}

void SetWallClockForTesting(absl::Duration ahead) { wall_ahead_ns = absl::ToInt64Nanoseconds(ahead); }

}  // namespace lossd::clocks
