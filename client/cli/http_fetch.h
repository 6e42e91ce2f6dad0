// Fetches a page over HTTP.
#ifndef LOSSD_CLIENT_CLI_HTTP_FETCH_H_
#define LOSSD_CLIENT_CLI_HTTP_FETCH_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace lossd::cli {

// The body of http://`address``path`; `address` is "host:port". UNAVAILABLE if there is no answer within
// `timeout`, INTERNAL for another answer than 200. Thread-safe.
absl::StatusOr<std::string> HttpFetch(const std::string& address, const std::string& path,
                                      absl::Duration timeout);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_HTTP_FETCH_H_
