// SPDX-License-Identifier: Apache-2.0
// Converts statuses between absl::Status and grpc::Status, with their lossd.v1.ErrorDetail; only this file
// does. It also converts deadlines of the program's steady clock to gRPC's clocks (GrpcTime).
//
// On the wire the detail is in the status details (grpc-status-details-bin), in a lossd.v1.StatusDetails. In
// an absl::Status it is the payload kErrorDetailType. The codes of both kinds of status have the same
// numbers.
//
// gRPC sends a status in trailers, which are small (peers accept 8 KiB by default). So messages are cut to
// kMaxMessageBytes, and only as many entries of a detail's `missing` are sent as fit; the last entry then
// counts the entries left out. A status may hold any bytes; bytes that are not UTF-8 are replaced by U+FFFD,
// because protobuf would not parse them.
//
// All functions are thread-safe.
#ifndef LOSSD_PROTO_WIRE_STATUS_DETAILS_H_
#define LOSSD_PROTO_WIRE_STATUS_DETAILS_H_

#include <grpc/support/time.h>
#include <grpcpp/support/status.h>
#include <grpcpp/support/time.h>

#include <cstddef>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"
#include "lossd/v1/types.pb.h"

namespace lossd::wire {

inline constexpr absl::string_view kErrorDetailType = "type.googleapis.com/lossd.v1.ErrorDetail";
inline constexpr size_t kMaxMessageBytes = 1000;
inline constexpr size_t kMaxDetailBytes = 2000;

// Makes a status with the detail in its binary details. `code` must not be OK.
grpc::Status MakeGrpcStatus(grpc::StatusCode code, absl::string_view message, const v1::ErrorDetail& detail);

// The detail that a peer sent; nullopt if there is none or it cannot be parsed.
std::optional<v1::ErrorDetail> GetErrorDetail(const grpc::Status& status);

// Attaches the detail and replaces an earlier one. No effect on an OK status.
void SetErrorDetail(const v1::ErrorDetail& detail, absl::Status* status);
std::optional<v1::ErrorDetail> GetErrorDetail(const absl::Status& status);

// Both convert code, message and, if there is one, the detail. A code unknown to gRPC becomes UNKNOWN.
grpc::Status ToGrpcStatus(const absl::Status& status);
absl::Status FromGrpcStatus(const grpc::Status& status);

// Converts a finite time of the program's steady clock to gRPC's monotonic clock, for set_deadline and
// Shutdown. Setting the wall clock does not change such a deadline.
inline gpr_timespec GrpcTime(absl::Time steady) {
  const int64_t left = absl::ToInt64Microseconds(steady - clocks::SteadyNow());
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_micros(left, GPR_TIMESPAN));
}

// Whether a deadline of gRPC, in any of its clocks, has passed.
inline bool HasPassed(gpr_timespec deadline) {
  return gpr_time_cmp(deadline, gpr_now(deadline.clock_type)) <= 0;
}

}  // namespace lossd::wire

#endif  // LOSSD_PROTO_WIRE_STATUS_DETAILS_H_
