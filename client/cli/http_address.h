// SPDX-License-Identifier: Apache-2.0
// Where a server answers HTTP, from what it says of itself and from how it was reached. Pure, thread-safe.
#ifndef LOSSD_CLIENT_CLI_HTTP_ADDRESS_H_
#define LOSSD_CLIENT_CLI_HTTP_ADDRESS_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "lossd/v1/server.pb.h"

namespace lossd::cli {

// Whether `text` is "HOST:PORT", "http://HOST:PORT" or "https://HOST:PORT". Behind a scheme the port may be
// left out.
bool IsHttpAddress(absl::string_view text);

// Where a server that is reached at `target` answers HTTP unless its --http says otherwise: port 7071 of the
// host, without TLS.
std::string DefaultHttpAddress(const std::string& target);

// "http://host:port" or "https://host:port" for a client that reaches gRPC of the server at `target`. A
// server that listens on every address is asked at the host of `target`, and so is one with TLS, whose
// certificate is for that host. FAILED_PRECONDITION, naming --http, if it has no HTTP, or none that another
// host reaches. Of a server that is too old to say, DefaultHttpAddress is taken.
absl::StatusOr<std::string> HttpAddressOf(const v1::ServerDescription& server, const std::string& target);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_HTTP_ADDRESS_H_
