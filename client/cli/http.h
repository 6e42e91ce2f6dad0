// SPDX-License-Identifier: Apache-2.0
// lossctl's HTTP client: finds the address at which a server answers HTTP, fetches pages from there, and
// parses the metrics on them. Functions are stateless and thread-safe.
#ifndef LOSSD_CLIENT_CLI_HTTP_H_
#define LOSSD_CLIENT_CLI_HTTP_H_

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/cpp/client_options.h"
#include "lossd/v1/server.pb.h"

namespace lossd::cli {

// Whether `text` is "HOST:PORT", "http://HOST:PORT" or "https://HOST:PORT". With a scheme the port may be
// left out.
bool IsHttpAddress(absl::string_view text);

// The default HTTP address of a server whose gRPC address is `target`: port 7071 of the same host, without
// TLS. A server has another address if it was started with --http.
std::string DefaultHttpAddress(const std::string& target);

// The HTTP address of a server, "http://host:port" or "https://host:port", for a client whose gRPC address of
// the server is `target`. The host is that of `target` if the server listens on every address or uses TLS,
// because its certificate is for that host. FAILED_PRECONDITION, naming --http, if the server has no HTTP
// address, or none that another host reaches. A server that is too old to say its address has
// DefaultHttpAddress.
absl::StatusOr<std::string> HttpAddressOf(const v1::ServerDescription& server, const std::string& target);

// The field (kernels/errors/field_error.h) that HttpFetch's errors about the address name.
inline constexpr absl::string_view kHttpField = "--http";

// The body of the page http://`address``path`, where `address` is "host:port". UNAVAILABLE if there is no
// answer within `timeout`; PERMISSION_DENIED (403), FAILED_PRECONDITION (409) or INTERNAL for other statuses
// than 200. `address` may also be "https://host:port"; then an authority in credentials.ca must have signed
// the server's certificate. A token is sent over TLS or to a loopback address only.
absl::StatusOr<std::string> HttpFetch(const std::string& address, const std::string& path,
                                      const client::CredentialOptions& credentials, absl::Duration timeout);
// The same with POST, for a request that makes the server do something.
absl::StatusOr<std::string> HttpPost(const std::string& address, const std::string& path,
                                     const client::CredentialOptions& credentials, absl::Duration timeout);

struct HttpAnswer {
  int status = 0;
  std::string content_type;  // of the body; "" if the server does not say it
  std::string body;
};

// Fetches `path` as the probes of Kubernetes do: without a token, and without checking the server's
// certificate. An answer of any status is returned; the errors are the same as of HttpFetch.
absl::StatusOr<HttpAnswer> HttpProbe(const std::string& address, const std::string& path,
                                     absl::Duration timeout);

// A sample of Prometheus' text format.
struct MetricSample {
  std::string name;
  std::map<std::string, std::string> labels;
  double value = 0;
};

// Parses Prometheus' text format, as much of it as the server prints. Comments and lines that are not samples
// are skipped.
std::vector<MetricSample> ParseMetrics(absl::string_view text);

// A histogram: cumulative counts by upper bound, from the samples `<name>_bucket`. Samples with different
// labels are summed.
using Buckets = std::map<double, double>;
Buckets BucketsOf(const std::vector<MetricSample>& samples, absl::string_view name);

// The counts between two scrapes.
Buckets Difference(const Buckets& later, const Buckets& earlier);

// The quantile q, interpolated linearly within a bucket, as Prometheus' histogram_quantile does; in the last
// bucket its lower bound. Nullopt if nothing was counted.
std::optional<double> Quantile(const Buckets& buckets, double q);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_HTTP_H_
