// SPDX-License-Identifier: Apache-2.0
// Finds out, after a connection has failed, what is at an address, because gRPC says no more than that the
// connection was closed. The file holds the probe, its sockets, its TLS handshake, and the rules for
// addresses.
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

// Contents of files in PEM form. TLS is expected if there are authorities.
struct TlsFiles {
  std::string ca;
  std::string cert;
  std::string key;
};

enum class Found {
  kUnknown,       // no fault: the server may be busy, or the address cannot be probed
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

// What a probe has found, and why.
struct Finding {
  Found found = Found::kUnknown;
  std::string why;  // kNoHost, kUnreachable, kNotTrusted: in words
};

// Connects to a gRPC target once or twice, which blocks for a few seconds at most.
Finding Probe(const std::string& target, const TlsFiles& files);

// Whether Probe() can tell if something listens at the target: it can for one host and its port, and for a
// Unix socket.
bool CanProbe(const std::string& target);

// How long a connection of a probe blocks at most, for each thing that it waits for.
inline constexpr absl::Duration kProbePatience = absl::Seconds(2);
inline constexpr size_t kFrameHeader = 9;  // bytes before the payload of a frame of HTTP/2

using Addresses = std::shared_ptr<const addrinfo>;

// What the resolver says of a host.
struct LookUp {
  Addresses addresses;  // null: there are none
  std::string why;      // if there are none
};
// The host's addresses. The resolver's own timeouts are long, so a thread of its own waits for the resolver.
// That thread may outlive this call.
LookUp LookUpHost(const std::string& host, uint16_t port);

// A connection of a probe, on which nothing blocks for longer than kProbePatience. Thread-compatible.
class ProbeSocket {
 public:
  // Connects to the first address that lets it; error() is errno if none does, ETIMEDOUT if none answers.
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

// How bytes go out and come in: the number of bytes, 0 at the end of the connection, negative with errno set;
// errno is EAGAIN if the other side says nothing.
struct Transport {
  std::function<std::ptrdiff_t(const char* bytes, size_t count)> send;
  std::function<std::ptrdiff_t(char* bytes, size_t count)> receive;
};
Transport PlainTransport(int descriptor);

// The first bytes that the other side says to an HTTP/2 client, at most kFrameHeader; empty if it hangs up;
// nullopt if it says nothing.
std::optional<std::string> FirstWords(const Transport& transport);

// Whether `words` begin with the settings that an HTTP/2 server says first: a frame of type 4 for stream 0.
bool AreHttp2Settings(absl::string_view words);

// How a TLS handshake on a connection of a probe ended.
enum class TlsEnd {
  kNoTls,      // the other side does not speak it, or hung up
  kSilent,     // it says nothing
  kRefused,    // it ended the handshake with an alert
  kHandshake,  // the handshake is complete
};

// What came of a TLS handshake.
struct TlsTalk {
  TlsEnd end = TlsEnd::kNoTls;
  std::string distrust;              // why its certificate is not trusted; empty if it is, or if none came
  std::optional<std::string> words;  // kHandshake: see FirstWords()
};

// Greets a server as a client of `host` would.
TlsTalk TalkTls(int descriptor, const std::string& host, const TlsFiles& files);

// Which of the files cannot be used (`option`: "ca", "cert" or "key"), and why (`problem`). An empty option:
// all files can be used.
struct FileProblem {
  std::string option;
  std::string problem;
};
FileProblem ProblemOf(const TlsFiles& files);

// The rest of the file is about the address of a server, a gRPC target name: what is wrong with it, and what
// is in it. These functions do no I/O. tests/client/golden/connecting.json has cases.

inline constexpr uint16_t kDefaultPort = 7070;  // of lossd's --listen

// What to write instead if this cannot be the address of a server; empty if it can. Addresses are
// "host:port", or a target name of gRPC's with a scheme of its own ("dns:///host:port", "unix:/run/lossd").
std::string TargetProblem(absl::string_view target);

// One host and its port.
struct HostAndPort {
  std::string host;  // "::1" of "[::1]:7070"; empty for targets that are not one host and its port
  uint16_t port = 0;
};
HostAndPort HostAndPortOf(absl::string_view target);

// The path of a Unix socket; empty for other targets.
std::string SocketPathOf(absl::string_view target);

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_PROBE_H_
