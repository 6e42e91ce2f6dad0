// SPDX-License-Identifier: Apache-2.0
// Finds out, after a connection has failed, what is at an address. gRPC says no more than that the connection
// was closed.
//
// Stateless and thread-safe.
#ifndef LOSSD_CLIENT_CPP_PROBE_H_
#define LOSSD_CLIENT_CPP_PROBE_H_

#include <string>

namespace lossd::client::internal {

// Contents of files in PEM form. TLS is expected if there are authorities.
struct TlsFiles {
  std::string ca;
  std::string cert;
  std::string key;
};

enum class Found {
  kUnknown,       // nothing that is wrong: a server that may be busy, or an address that cannot be probed
  kNoHost,        // the host's name has no address
  kNoAnswer,      // the host does not answer
  kRefused,       // nothing listens
  kUnreachable,   // another error of the system
  kClosed,        // the connection was closed before a word was said
  kHttp2,         // HTTP/2 without TLS, though TLS is expected
  kHttp1,         // a web server without TLS
  kOther,         // neither HTTP nor TLS
  kTls,           // TLS, though none is expected
  kNotTrusted,    // TLS with a certificate that is not of the authorities, or for another host
  kNoClientCert,  // TLS that ends because of the client's certificate, or for want of one
  kTlsOther,      // TLS, but behind it not HTTP/2
};

struct Finding {
  Found found = Found::kUnknown;
  std::string why;  // kNoHost, kUnreachable, kNotTrusted: in words
};

// Connects to a gRPC target once or twice, which blocks for a few seconds at most.
Finding Probe(const std::string& target, const TlsFiles& files);

// Whether Probe() finds out if somebody is there: for one host and its port, and for Unix sockets.
bool CanProbe(const std::string& target);

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_PROBE_H_
