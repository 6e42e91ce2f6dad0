// SPDX-License-Identifier: Apache-2.0
// Fetches a page over HTTP, or asks for something to be done.
#ifndef LOSSD_CLIENT_CLI_HTTP_FETCH_H_
#define LOSSD_CLIENT_CLI_HTTP_FETCH_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/cpp/credentials.h"

namespace lossd::cli {

// The field (kernels/errors/field_error.h) of HttpFetch's errors about the address.
inline constexpr absl::string_view kHttpField = "--http";

// The body of http://`address``path`; `address` is "host:port". UNAVAILABLE if there is no answer within
// `timeout`, PERMISSION_DENIED (403), FAILED_PRECONDITION (409) or INTERNAL for another answer than 200.
// Thread-safe. `address` may also be "https://host:port"; then the server's certificate must be of
// credentials.ca. A token is sent over TLS or to a loopback address only.
absl::StatusOr<std::string> HttpFetch(const std::string& address, const std::string& path,
                                      const client::CredentialOptions& credentials, absl::Duration timeout);
// The same of what a server does when it is asked with POST.
absl::StatusOr<std::string> HttpPost(const std::string& address, const std::string& path,
                                     const client::CredentialOptions& credentials, absl::Duration timeout);

struct HttpAnswer {
  int status = 0;
  std::string content_type;  // of the body; "" if it is not said
  std::string body;
};

// Whatever is answered at `path`, to a probe: without a token, and without a look at the server's
// certificate, as the probes of Kubernetes. Errors like those of HttpFetch, but for the status. Thread-safe.
absl::StatusOr<HttpAnswer> HttpProbe(const std::string& address, const std::string& path,
                                     absl::Duration timeout);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_HTTP_FETCH_H_
