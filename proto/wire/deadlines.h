// SPDX-License-Identifier: Apache-2.0
// Times of the program's steady clock for gRPC, which takes them as times of its own monotonic clock: a wall
// clock that is set changes no deadline.
#ifndef LOSSD_PROTO_WIRE_DEADLINES_H_
#define LOSSD_PROTO_WIRE_DEADLINES_H_

#include <grpc/support/time.h>
#include <grpcpp/support/time.h>

#include "absl/time/time.h"
#include "kernels/clocks/clock.h"

namespace lossd::wire {

// For set_deadline and Shutdown. `steady` is finite.
inline gpr_timespec GrpcTime(absl::Time steady) {
  const int64_t left = absl::ToInt64Microseconds(steady - clocks::SteadyNow());
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_micros(left, GPR_TIMESPAN));
}

// Whether a deadline of gRPC's, in whatever clock, has passed.
inline bool HasPassed(gpr_timespec deadline) {
  return gpr_time_cmp(deadline, gpr_now(deadline.clock_type)) <= 0;
}

}  // namespace lossd::wire

#endif  // LOSSD_PROTO_WIRE_DEADLINES_H_
