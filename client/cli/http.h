// SPDX-License-Identifier: Apache-2.0
// lossctl's HTTP client: at which address a server answers HTTP, how a page is fetched from there, and how
// the metrics on such a page are read. Functions are stateless and thread-safe.
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

// The field (kernels/errors/field_error.h) of HttpFetch's errors about the address.
inline constexpr absl::string_view kHttpField = "--http";

// The body of http://`address``path`; `address` is "host:port". UNAVAILABLE if there is no answer within
// `timeout`, PERMISSION_DENIED (403), FAILED_PRECONDITION (409) or INTERNAL for another answer than 200.
// `address` may also be "https://host:port"; then the server's certificate must be of
// credentials.ca. A token is sent over TLS or to a loopback address only.
absl::StatusOr<std::string> HttpFetch(const std::string& address, const std::string& path,
                                      const client::CredentialOptions& credentials, absl::Duration timeout);
// The same with POST, for what a server does when it is asked.
absl::StatusOr<std::string> HttpPost(const std::string& address, const std::string& path,
                                     const client::CredentialOptions& credentials, absl::Duration timeout);

struct HttpAnswer {
  int status = 0;
  std::string content_type;  // of the body; "" if it is not said
  std::string body;
};

// Whatever is answered at `path`, to a probe: without a token, and without a look at the server's
// certificate, as the probes of Kubernetes. The errors are the same as of HttpFetch, except that any status
// is an answer.
absl::StatusOr<HttpAnswer> HttpProbe(const std::string& address, const std::string& path,
                                     absl::Duration timeout);

// A sample of Prometheus' text format.
struct MetricSample {
  std::string name;
  std::map<std::string, std::string> labels;
  double value = 0;
};

// Reads Prometheus' text format, as far as servers print it. Comments and lines that are no samples are left
// out.
std::vector<MetricSample> ParseMetrics(absl::string_view text);

// Cumulative counts by upper bound, as in `<name>_bucket` samples; several label sets are summed.
using Buckets = std::map<double, double>;
Buckets BucketsOf(const std::vector<MetricSample>& samples, absl::string_view name);

// What was counted between two scrapes.
Buckets Difference(const Buckets& later, const Buckets& earlier);

// Linear within a bucket, as Prometheus' histogram_quantile; in the last bucket its lower bound. nullopt if
// nothing was counted.
std::optional<double> Quantile(const Buckets& buckets, double q);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_HTTP_H_
