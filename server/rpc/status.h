// SPDX-License-Identifier: Apache-2.0
// Turns absl::Status, the one error type below this layer, into the status that a gRPC call ends with. It is
// shorter than 60 lines because four other sources of this folder include it.
//
// All functions are thread-safe.
#ifndef LOSSD_SERVER_RPC_STATUS_H_
#define LOSSD_SERVER_RPC_STATUS_H_

#include <grpcpp/support/status.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/metrics/metrics.h"

namespace lossd::rpc {

// What a call ends with: the code, the message, and a lossd.v1.ErrorDetail with the field and value at fault,
// the step that is open, and the server's incarnation.
grpc::Status ToGrpc(absl::Status status, uint64_t incarnation);

// The same, and counts an error: by its method and code, and the engine's limit that caused it.
grpc::Status CountedEnd(absl::string_view method, absl::Status status, uint64_t incarnation,
                        metrics::Metrics* metrics);

// "INVALID_ARGUMENT" and so on.
std::string CodeName(const grpc::Status& status);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_STATUS_H_
