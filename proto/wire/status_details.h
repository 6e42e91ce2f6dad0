// SPDX-License-Identifier: Apache-2.0
// The one place where statuses change form: absl::Status <-> grpc::Status, with lossd.v1.ErrorDetail
// carried along. Deadlines change form here, too: the program's steady clock <-> gRPC's clocks (GrpcTime).
//
// On the wire the detail lies in the status details (grpc-status-details-bin) as a lossd.v1.StatusDetails,
// in an absl::Status as the payload named kErrorDetailType. Codes of both kinds have the same numbers.
//
// Trailers are small (peers accept 8 KiB by default), so messages are cut to kMaxMessageBytes and of a
// detail's `missing` only as many entries are sent as fit; the last one then counts the others. A status may
// hold any bytes; those that are not UTF-8 are replaced by U+FFFD, because protobuf would not read them.
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

// A status with the detail in its binary details. `code` must not be OK.
grpc::Status MakeGrpcStatus(grpc::StatusCode code, absl::string_view message, const v1::ErrorDetail& detail);

// The detail a peer sent; nullopt if there is none or it cannot be read.
std::optional<v1::ErrorDetail> GetErrorDetail(const grpc::Status& status);

// Attaches the detail, replacing an earlier one. No effect on an OK status.
void SetErrorDetail(const v1::ErrorDetail& detail, absl::Status* status);
std::optional<v1::ErrorDetail> GetErrorDetail(const absl::Status& status);

// Code, message and, if there is one, the detail. A code unknown to gRPC becomes UNKNOWN.
grpc::Status ToGrpcStatus(const absl::Status& status);
absl::Status FromGrpcStatus(const grpc::Status& status);

// A time of the program's steady clock as a time of gRPC's monotonic clock, for set_deadline and Shutdown. A
// wall clock that is set changes no such deadline. `steady` is finite.
inline gpr_timespec GrpcTime(absl::Time steady) {
  const int64_t left = absl::ToInt64Microseconds(steady - clocks::SteadyNow());
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_micros(left, GPR_TIMESPAN));
}

// Whether a deadline of gRPC's, in whatever clock, has passed.
inline bool HasPassed(gpr_timespec deadline) {
  return gpr_time_cmp(deadline, gpr_now(deadline.clock_type)) <= 0;
}

}  // namespace lossd::wire

#endif  // LOSSD_PROTO_WIRE_STATUS_DETAILS_H_
