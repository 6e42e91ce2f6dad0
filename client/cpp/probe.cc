// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/probe.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <optional>

#include "absl/strings/match.h"
#include "client/cpp/probe_socket.h"
#include "client/cpp/probe_tls.h"
#include "client/cpp/target.h"

namespace lossd::client::internal {
namespace {

Finding NoConnection(int error) {
  if (error == ETIMEDOUT) return {Found::kNoAnswer, ""};
  if (error == ECONNREFUSED) return {Found::kRefused, ""};
  return {Found::kUnreachable, std::strerror(error)};
}

Finding ProbeUnixSocket(const std::string& path) {
  const ProbeSocket socket = ProbeSocket::ToPath(path);
  // One whose queue is full belongs to a server that is busy.
  return socket.error() == 0 || socket.error() == ETIMEDOUT ? Finding() : NoConnection(socket.error());
}

// `words`: what was said after a TLS handshake; nullopt: nothing yet.
Finding BehindTls(const std::optional<std::string>& words) {
  if (!words.has_value() || AreHttp2Settings(*words)) return {};
  return {words->empty() ? Found::kNoClientCert : Found::kTlsOther, ""};
}

Finding ProbeTls(const HostAndPort& at, const addrinfo* addresses, const TlsFiles& files,
                 bool said_something) {
  const ProbeSocket socket = ProbeSocket::ToHost(addresses);
  const TlsTalk talk = socket.error() == 0 ? TalkTls(socket.descriptor(), at.host, files) : TlsTalk();
  const bool expected = !files.ca.empty();
  switch (talk.end) {
    case TlsEnd::kSilent:
      return {};
    case TlsEnd::kNoTls:
      return {said_something ? Found::kOther : Found::kClosed, ""};
    case TlsEnd::kRefused:
      if (!expected) return {Found::kTls, ""};
      return talk.distrust.empty() ? Finding{Found::kNoClientCert, ""}
                                   : Finding{Found::kNotTrusted, talk.distrust};
    case TlsEnd::kHandshake:
      break;
  }
  if (!expected) return {Found::kTls, ""};
  return talk.distrust.empty() ? BehindTls(talk.words) : Finding{Found::kNotTrusted, talk.distrust};
}

}  // namespace

Finding Probe(const std::string& target, const TlsFiles& files) {
  if (const std::string path = SocketPathOf(target); !path.empty()) return ProbeUnixSocket(path);
  const HostAndPort at = HostAndPortOf(target);
  if (at.host.empty()) return {};
  const LookUp host = LookUpHost(at.host, at.port);
  if (host.addresses == nullptr) return {Found::kNoHost, host.why};
  const ProbeSocket socket = ProbeSocket::ToHost(host.addresses.get());
  if (socket.error() != 0) return NoConnection(socket.error());
  const std::optional<std::string> words = FirstWords(PlainTransport(socket.descriptor()));
  if (!words.has_value()) return {};
  if (AreHttp2Settings(*words)) return {files.ca.empty() ? Found::kUnknown : Found::kHttp2, ""};
  if (absl::StartsWith(*words, "HTTP/1")) return {Found::kHttp1, ""};
  return ProbeTls(at, host.addresses.get(), files, words->size() >= kFrameHeader);
}

bool CanProbe(const std::string& target) {
  return !SocketPathOf(target).empty() || !HostAndPortOf(target).host.empty();
}

}  // namespace lossd::client::internal
