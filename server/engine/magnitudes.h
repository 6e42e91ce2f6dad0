// SPDX-License-Identifier: Apache-2.0
// Magnitudes says how large the values and moments of a head are at most. What an update can make of them
// follows from that (operations.h).
//
// A session keeps the magnitudes from step to step. A write into the head makes them unknown; a step whose
// outcome depends on them then reads the tensors.
//
// Threads. On the device thread only.
#ifndef LOSSD_SERVER_ENGINE_MAGNITUDES_H_
#define LOSSD_SERVER_ENGINE_MAGNITUDES_H_

#include <cstdint>
#include <limits>

#include "absl/status/statusor.h"
#include "kernels/head_config.h"
#include "server/head/head.h"

namespace lossd::engine {

// Each is the most that |x| may be. Infinity: not known, or some x is not finite.
struct Magnitudes {
  static constexpr double kUnknown = std::numeric_limits<double>::infinity();

  double matrix = kUnknown;   // the weight
  double vectors = kUnknown;  // bias, norm gain and norm shift
  double moment1 = 0.0;
  double moment2 = 0.0;
};

// How many values and moments are no finite numbers, by kind. A bias may be: -infinity keeps a class out.
struct NotFinite {
  int64_t nan = 0;
  int64_t infinite = 0;
  int64_t minus_infinite = 0;

  // How many more there are of each kind than before. So it counts a -infinity that has become NaN, too.
  int64_t MoreThan(const NotFinite& before) const;
};

struct Measurement {
  Magnitudes most;
  NotFinite not_finite;
};
// Reads all values and moments. Fails as Head::ReadRows.
absl::StatusOr<Measurement> Measure(head::Head& head);

// Makes unknown what has been written since the last call.
void ForgetWritten(head::Head& head, Magnitudes* magnitudes);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_MAGNITUDES_H_
