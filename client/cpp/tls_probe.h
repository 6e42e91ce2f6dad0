// Finds out, after a connection has failed, what the server at an address speaks. gRPC says no more than that
// the connection was closed.
//
// Stateless and thread-safe. Blocks for a few seconds at most.
#ifndef LOSSD_CLIENT_CPP_TLS_PROBE_H_
#define LOSSD_CLIENT_CPP_TLS_PROBE_H_

#include <string>

namespace lossd::client::internal {

enum class Speech {
  kNothing,  // no connection, or no answer that is known
  kPlain,    // HTTP/2 without TLS
  kTls,
};

struct TlsProbe {
  Speech speech = Speech::kNothing;
  std::string distrust;  // kTls: why the server's certificate is not trusted; empty if it is
};

// `target` is a gRPC target, "host:port"; `authorities` certificates in PEM form, without which no
// certificate is trusted.
TlsProbe ProbeTls(const std::string& target, const std::string& authorities);

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_TLS_PROBE_H_
