// Statuses as the protocol wants them: with the field at fault, its value and the server's incarnation in
// their lossd.v1.ErrorDetail.
//
// All functions are thread-safe.
#ifndef LOSSD_SERVER_RPC_ERRORS_H_
#define LOSSD_SERVER_RPC_ERRORS_H_

#include <grpcpp/support/status.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace lossd::rpc {

// "<field> must <rule>, got <value>", with field and value in the detail.
absl::Status FieldError(absl::string_view field, absl::string_view rule, const absl::AlphaNum& value,
                        absl::StatusCode code = absl::StatusCode::kInvalidArgument);

// FAILED_PRECONDITION if a request is meant for another server process than this one.
absl::Status CheckIncarnation(absl::string_view field, uint64_t meant, uint64_t own);

// For errors from below that name fields without their place in the request: kernels::Validate's "<field>
// must ..., got <value>" becomes "<prefix><field> must ..., got <value>" and gets its detail; an unknown
// head becomes an error of the field "<prefix>head". Others stay.
absl::Status Located(absl::Status status, absl::string_view prefix);

// Adds lines to ErrorDetail.missing.
absl::Status WithMissing(absl::Status status, const std::vector<std::string>& missing);

// What a call ends with. Field, value and step of the engine's errors (engine/errors.h) become the detail.
grpc::Status ToGrpc(absl::Status status, uint64_t incarnation);

// "INVALID_ARGUMENT" and so on.
std::string CodeName(const grpc::Status& status);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_ERRORS_H_
