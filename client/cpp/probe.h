// SPDX-License-Identifier: Apache-2.0
// Finds out what is at the address of a server after a connection has failed (Probe), because gRPC reports
// only that the connection was closed. The file also has the sockets and the TLS handshake of the probe, and
// the rules for addresses (TargetProblem).
//
// Functions are stateless and thread-safe; ProbeSocket is thread-compatible.
#ifndef LOSSD_CLIENT_CPP_PROBE_H_
#define LOSSD_CLIENT_CPP_PROBE_H_

#include <netdb.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace lossd::client::internal {

// The contents of files in PEM format. The client expects TLS if `ca` is not empty.
struct TlsFiles {
  std::string ca;
  std::string cert;
  std::string key;
};

// What is at the address.
enum class Found {
  kUnknown,       // no fault: the server may be busy, or the address cannot be probed
  kNoHost,        // the host's name has no address
  kNoAnswer,      // the host does not answer
  kRefused,       // nothing listens
  kUnreachable,   // another error of the system
  kClosed,        // the connection was closed before any data came
  kHttp2,         // HTTP/2 without TLS, though TLS is expected
  kHttp1,         // a web server without TLS
  kOther,         // neither HTTP nor TLS
  kTls,           // TLS, though none is expected
  kNotTrusted,    // TLS, but the certificate is not from the authorities, or is for another host
  kNoClientCert,  // TLS, but the server refuses the client's certificate, or misses one
  kTlsOther,      // TLS, but not HTTP/2 inside it
};

// What a probe has found, and why.
struct Finding {
  Found found = Found::kUnknown;
  std::string why;  // the reason in words, for kNoHost, kUnreachable and kNotTrusted
};

// Connects to a gRPC target once or twice, and says what it finds. Blocks for a few seconds at most.
Finding Probe(const std::string& target, const TlsFiles& files);

// Whether Probe() can tell if a program listens at the target. It can if the target is one host and its port,
// or a Unix socket.
bool CanProbe(const std::string& target);

// How long a connection of a probe waits at most for each single operation.
inline constexpr absl::Duration kProbePatience = absl::Seconds(2);
inline constexpr size_t kFrameHeader = 9;  // bytes of the header of an HTTP/2 frame

using Addresses = std::shared_ptr<const addrinfo>;

// The result of LookUpHost.
struct LookUp {
  Addresses addresses;  // null: there are none
  std::string why;      // if there are none
};
// Looks up the host's addresses. The resolver's own timeouts are long, so a separate thread waits for the
// resolver; this thread may outlive the call.
LookUp LookUpHost(const std::string& host, uint16_t port);

// A connection of a probe. No operation on it blocks for longer than kProbePatience. Thread-compatible.
class ProbeSocket {
 public:
  // Connects to the first address that accepts the connection. If no address does, error() is the errno,
  // ETIMEDOUT if no address answers.
  static ProbeSocket ToHost(const addrinfo* addresses);
  static ProbeSocket ToPath(const std::string& path);

  ProbeSocket(ProbeSocket&& other) noexcept;
  ProbeSocket& operator=(ProbeSocket&&) = delete;
  ~ProbeSocket();

  int descriptor() const { return descriptor_; }
  int error() const { return error_; }  // 0: it is connected

 private:
  ProbeSocket(int family, const void* address, size_t size);
  explicit ProbeSocket(int error) : error_(error) {}

  int descriptor_ = -1;
  int error_ = 0;
};

// The functions that send and receive bytes on a connection. They return the number of bytes, 0 at the end of
// the connection, or a negative number with errno set. errno is EAGAIN if the other side sends nothing in
// time.
struct Transport {
  std::function<std::ptrdiff_t(const char* bytes, size_t count)> send;
  std::function<std::ptrdiff_t(char* bytes, size_t count)> receive;
};
Transport PlainTransport(int descriptor);

// The first bytes that the other side sends to an HTTP/2 client, at most kFrameHeader. Empty if the other
// side closes the connection; nullopt if it sends nothing.
std::optional<std::string> FirstWords(const Transport& transport);

// Whether `words`, the first bytes of a server, begin with the settings that an HTTP/2 server sends first: a
// frame of type 4 for stream 0.
bool AreHttp2Settings(absl::string_view words);

// How a TLS handshake on a connection of a probe ended.
enum class TlsEnd {
  kNoTls,      // the other side does not speak TLS, or closed the connection
  kSilent,     // the other side sends nothing
  kRefused,    // the other side ended the handshake with an alert
  kHandshake,  // the handshake is complete
};

// The result of a TLS handshake.
struct TlsTalk {
  TlsEnd end = TlsEnd::kNoTls;
  std::string distrust;              // why the certificate is not trusted; empty if it is, or if none came
  std::optional<std::string> words;  // kHandshake: see FirstWords()
};

// Does a TLS handshake with a server, as a client of `host` would.
TlsTalk TalkTls(int descriptor, const std::string& host, const TlsFiles& files);

// The first file that cannot be used (`option`: "ca", "cert" or "key"), and the reason (`problem`). `option`
// is empty if all files can be used.
struct FileProblem {
  std::string option;
  std::string problem;
};
FileProblem ProblemOf(const TlsFiles& files);

// The functions below check and take apart the address of a server, a gRPC target name. They do no I/O.
// tests/client/golden/connecting.json has cases.

inline constexpr uint16_t kDefaultPort = 7070;  // the default of lossd's --listen

// If `target` cannot be the address of a server: a text that says what to write instead. Otherwise empty. An
// address is "host:port", or a target name of gRPC with a scheme ("dns:///host:port", "unix:/run/lossd").
std::string TargetProblem(absl::string_view target);

// One host and its port.
struct HostAndPort {
  std::string host;  // "::1" for "[::1]:7070"; empty if the target is not one host and its port
  uint16_t port = 0;
};
HostAndPort HostAndPortOf(absl::string_view target);

// The path, if the target is a Unix socket; empty for other targets.
std::string SocketPathOf(absl::string_view target);

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_PROBE_H_
