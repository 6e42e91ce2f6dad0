// SPDX-License-Identifier: Apache-2.0
// The probe of a server's address (probe.h): plain and TLS connections to it, and the rules for addresses.
#include "client/cpp/probe.h"

#include <arpa/inet.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/notification.h"
#include "client/cpp/client_options.h"
#include "kernels/clocks/clock.h"

namespace lossd::client::internal {

// ---- The probe ----

namespace {

Finding NoConnection(int error) {
  if (error == ETIMEDOUT) return {Found::kNoAnswer, ""};
  if (error == ECONNREFUSED) return {Found::kRefused, ""};
  return {Found::kUnreachable, std::strerror(error)};
}

Finding ProbeUnixSocket(const std::string& path) {
  const ProbeSocket socket = ProbeSocket::ToPath(path);
  // ETIMEDOUT means that the socket's queue is full: its server is busy.
  return socket.error() == 0 || socket.error() == ETIMEDOUT ? Finding() : NoConnection(socket.error());
}

// The finding after a complete TLS handshake. `words`: the first bytes that came then; nullopt: none came in
// time.
Finding BehindTls(const std::optional<std::string>& words) {
  if (!words.has_value() || AreHttp2Settings(*words)) return {};
  return {words->empty() ? Found::kNoClientCert : Found::kTlsOther, ""};
}

Finding ProbeTls(const HostAndPort& at, const addrinfo* addresses, const TlsFiles& files,
                 bool said_something) {
  const ProbeSocket socket = ProbeSocket::ToHost(addresses);
  const TlsTalk talk = socket.error() == 0 ? TalkTls(socket.descriptor(), at.host, files) : TlsTalk();
  const bool expected = !files.ca.empty();  // this client speaks TLS, too
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

// ---- Sockets ----

namespace {

// The state that the thread of a look-up shares with its caller.
struct PendingLookUp {
  clocks::Event done;
  addrinfo* found = nullptr;
  int error = 0;

  ~PendingLookUp() {
    if (found != nullptr) freeaddrinfo(found);
  }
};

std::string WhyNoAddress(int error) {
  return absl::StrCat("the name of the host was not found (", gai_strerror(error), ")");
}

}  // namespace

LookUp LookUpHost(const std::string& host, uint16_t port) {
  auto pending = std::make_shared<PendingLookUp>();
  std::thread([pending, host, port = absl::StrCat(port)] {
    addrinfo hints = {};
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    pending->error = getaddrinfo(host.c_str(), port.c_str(), &hints, &pending->found);
    pending->done.Notify();
  }).detach();
  if (!pending->done.AwaitFor(kProbePatience)) {
    return {nullptr, absl::StrCat("the name of the host was not found within ",
                                  absl::ToInt64Seconds(kProbePatience), " s")};
  }
  if (pending->error != 0 || pending->found == nullptr) return {nullptr, WhyNoAddress(pending->error)};
  return {Addresses(pending, pending->found), ""};
}

ProbeSocket ProbeSocket::ToHost(const addrinfo* addresses) {
  ProbeSocket first(addresses->ai_family, addresses->ai_addr, addresses->ai_addrlen);
  for (const addrinfo* next = addresses->ai_next; first.error_ != 0 && next != nullptr;
       next = next->ai_next) {
    ProbeSocket other(next->ai_family, next->ai_addr, next->ai_addrlen);
    if (other.error_ == 0) return other;
  }
  return first;
}

ProbeSocket ProbeSocket::ToPath(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) return ProbeSocket(ENAMETOOLONG);
  std::memcpy(address.sun_path, path.data(), path.size());
  return {AF_UNIX, &address, sizeof(address)};
}

ProbeSocket::ProbeSocket(int family, const void* address, size_t size)
    : descriptor_(socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  const timeval patience = absl::ToTimeval(kProbePatience);
  if (descriptor_ >= 0) {
    setsockopt(descriptor_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    setsockopt(descriptor_, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));  // for connect() too
    if (connect(descriptor_, static_cast<const sockaddr*>(address), static_cast<socklen_t>(size)) == 0)
      return;
  }
  error_ = errno == EINPROGRESS || errno == EAGAIN ? ETIMEDOUT : errno;
}

ProbeSocket::ProbeSocket(ProbeSocket&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), error_(other.error_) {}

ProbeSocket::~ProbeSocket() {
  if (descriptor_ >= 0) close(descriptor_);
}

Transport PlainTransport(int descriptor) {
  return {.send = [descriptor](const char* bytes,
                               size_t count) { return send(descriptor, bytes, count, MSG_NOSIGNAL); },
          .receive = [descriptor](char* bytes, size_t count) { return recv(descriptor, bytes, count, 0); }};
}

std::optional<std::string> FirstWords(const Transport& transport) {
  // The first bytes of an HTTP/2 client: the preface, and empty settings.
  constexpr absl::string_view kPreface("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0", 33);
  // Even if the send fails, the other side may have sent something.
  (void)transport.send(kPreface.data(), kPreface.size());
  std::string words;
  char more[kFrameHeader];
  while (words.size() < kFrameHeader) {
    errno = 0;
    const std::ptrdiff_t count = transport.receive(more, kFrameHeader - words.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN && words.empty()) return std::nullopt;
    if (count <= 0) break;
    words.append(more, static_cast<size_t>(count));
  }
  return words;
}

bool AreHttp2Settings(absl::string_view words) {
  // The header of a frame: 3 bytes for its length, its type (4: settings), flags, and 4 bytes for the stream,
  // which is 0. Settings are shorter than 2^16 bytes, so the first byte is 0.
  return words.size() >= kFrameHeader && words[0] == 0 && words[3] == 4 &&
         words.substr(5, 4) == absl::string_view("\0\0\0\0", 4);
}

// ---- TLS ----

namespace {

struct Free {
  void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
  void operator()(SSL* ssl) const { SSL_free(ssl); }
  void operator()(BIO* bio) const { BIO_free(bio); }
  void operator()(X509* certificate) const { X509_free(certificate); }
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
};
template <typename T>
using Owned = std::unique_ptr<T, Free>;

Owned<BIO> Bio(const std::string& pem) {
  return Owned<BIO>(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
}

// OpenSSL calls this function for a password, and so does not ask at the terminal.
int NoPassword(char*, int, int, void*) { return 0; }

Owned<X509> NextCertificate(BIO* bio) {
  return Owned<X509>(PEM_read_bio_X509(bio, nullptr, NoPassword, nullptr));
}

Owned<EVP_PKEY> KeyIn(const std::string& pem) {
  return Owned<EVP_PKEY>(PEM_read_bio_PrivateKey(Bio(pem).get(), nullptr, NoPassword, nullptr));
}

void AddAuthorities(SSL_CTX* context, const std::string& pem) {
  const Owned<BIO> bio = Bio(pem);
  while (const Owned<X509> certificate = NextCertificate(bio.get())) {
    X509_STORE_add_cert(SSL_CTX_get_cert_store(context), certificate.get());
  }
}

void UseCertificate(SSL_CTX* context, const TlsFiles& files) {
  if (files.cert.empty()) return;
  const Owned<BIO> bio = Bio(files.cert);
  SSL_CTX_use_certificate(context, NextCertificate(bio.get()).get());
  while (const Owned<X509> next = NextCertificate(bio.get())) SSL_CTX_add1_chain_cert(context, next.get());
  SSL_CTX_use_PrivateKey(context, KeyIn(files.key).get());
}

Owned<SSL> Connection(SSL_CTX* context, int descriptor, const std::string& host) {
  Owned<SSL> ssl(SSL_new(context));
  constexpr unsigned char kHttp2[] = {2, 'h', '2'};
  SSL_set_alpn_protos(ssl.get(), kHttp2, sizeof(kHttp2));
  X509_VERIFY_PARAM* const wanted = SSL_get0_param(ssl.get());
  if (X509_VERIFY_PARAM_set1_ip_asc(wanted, host.c_str()) != 1) {
    X509_VERIFY_PARAM_set1_host(wanted, host.c_str(), host.size());
    SSL_set_tlsext_host_name(ssl.get(), host.c_str());
  }
  SSL_set_fd(ssl.get(), descriptor);
  return ssl;
}

std::string Distrust(SSL* ssl) {
  const Owned<X509> certificate(SSL_get1_peer_certificate(ssl));
  if (certificate == nullptr) return "";
  const long verified = SSL_get_verify_result(ssl);  // NOLINT(google-runtime-int)
  return verified == X509_V_OK ? "" : X509_verify_cert_error_string(verified);
}

// How a handshake that returned `result` ended.
TlsEnd EndOf(SSL* ssl, int result) {
  if (result == 1) return TlsEnd::kHandshake;
  switch (SSL_get_error(ssl, result)) {
    case SSL_ERROR_WANT_READ:
    case SSL_ERROR_WANT_WRITE:
      return TlsEnd::kSilent;
    case SSL_ERROR_SSL:
      break;
    default:  // the connection ended
      return TlsEnd::kNoTls;
  }
  // Reasons above this number are TLS alerts of the other side. Any other reason means that the other side
  // does not send TLS.
  const int reason = ERR_GET_REASON(ERR_peek_error());
  return reason > SSL_AD_REASON_OFFSET ? TlsEnd::kRefused : TlsEnd::kNoTls;
}

// Reads bytes with the results of recv(): negative, with errno EAGAIN, if nothing comes in time.
std::ptrdiff_t Receive(SSL* ssl, char* bytes, size_t count) {
  const int result = SSL_read(ssl, bytes, static_cast<int>(count));
  if (result > 0) return result;
  const int error = SSL_get_error(ssl, result);
  errno = error == SSL_ERROR_WANT_READ ? EAGAIN : EIO;
  return error == SSL_ERROR_ZERO_RETURN ? 0 : -1;
}

// Blocks SIGPIPE in this thread while the object lives, because OpenSSL writes to closed connections without
// MSG_NOSIGNAL.
class NoPipeSignal {
 public:
  NoPipeSignal() {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~NoPipeSignal() {
    if (sigismember(&before_, SIGPIPE) == 1) return;
    const timespec now = {};
    while (sigtimedwait(&pipe_, nullptr, &now) == SIGPIPE) continue;
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  NoPipeSignal(const NoPipeSignal&) = delete;
  NoPipeSignal& operator=(const NoPipeSignal&) = delete;

 private:
  sigset_t pipe_;
  sigset_t before_;
};

}  // namespace

TlsTalk TalkTls(int descriptor, const std::string& host, const TlsFiles& files) {
  const NoPipeSignal no_pipe_signal;
  const Owned<SSL_CTX> context(SSL_CTX_new(TLS_client_method()));
  AddAuthorities(context.get(), files.ca);
  UseCertificate(context.get(), files);
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_NONE, nullptr);  // goes on; the result is read later
  const Owned<SSL> ssl = Connection(context.get(), descriptor, host);
  ERR_clear_error();
  TlsTalk talk;
  talk.end = EndOf(ssl.get(), SSL_connect(ssl.get()));
  talk.distrust = Distrust(ssl.get());
  if (talk.end == TlsEnd::kHandshake && talk.distrust.empty()) {
    talk.words =
        FirstWords({.send = [&](const char* bytes, size_t count) -> std::ptrdiff_t {
                      return SSL_write(ssl.get(), bytes, static_cast<int>(count));
                    },
                    .receive = [&](char* bytes, size_t count) { return Receive(ssl.get(), bytes, count); }});
  }
  ERR_clear_error();
  return talk;
}

FileProblem ProblemOf(const TlsFiles& files) {
  FileProblem problem;
  if (!files.ca.empty() && NextCertificate(Bio(files.ca).get()) == nullptr) {
    problem = {"ca", "which has no certificate"};
  } else if (!files.cert.empty()) {
    const Owned<X509> certificate = NextCertificate(Bio(files.cert).get());
    const Owned<EVP_PKEY> key = KeyIn(files.key);
    if (certificate == nullptr) {
      problem = {"cert", "which has no certificate"};
    } else if (key == nullptr) {
      problem = {"key", "which has no private key that can be read without a password"};
    } else if (X509_check_private_key(certificate.get(), key.get()) != 1) {
      problem = {"key", "which is not that of the certificate"};
    }
  }
  ERR_clear_error();
  return problem;
}

}  // namespace lossd::client::internal

namespace lossd::client {

// ---- Targets ----

namespace internal {
namespace {

// Schemes of gRPC's target names.
constexpr std::array<absl::string_view, 3> kWithHost = {"dns", "ipv4", "ipv6"};
constexpr std::array<absl::string_view, 5> kWithoutHost = {"unix", "unix-abstract", "vsock", "xds",
                                                           "google-c2p"};

template <size_t kCount>
bool Has(const std::array<absl::string_view, kCount>& schemes, absl::string_view scheme) {
  return std::find(schemes.begin(), schemes.end(), scheme) != schemes.end();
}

struct Parts {
  absl::string_view scheme;  // empty if there is none that gRPC knows
  absl::string_view rest;
};

Parts SplitScheme(absl::string_view target) {
  const size_t colon = target.find(':');
  if (colon == absl::string_view::npos) return {"", target};
  const absl::string_view scheme = target.substr(0, colon);
  if (!Has(kWithHost, scheme) && !Has(kWithoutHost, scheme)) return {"", target};
  return {scheme, target.substr(colon + 1)};
}

bool IsNumber(absl::string_view text) {
  return !text.empty() &&
         std::all_of(text.begin(), text.end(), [](char c) { return absl::ascii_isdigit(c); });
}

// 0 if the text is not a port.
uint16_t PortOf(absl::string_view text) {
  uint32_t number = 0;
  const bool is_port = IsNumber(text) && absl::SimpleAtoi(text, &number) && number <= 65535;
  return is_port ? static_cast<uint16_t>(number) : 0;
}

bool IsSchemeCharacter(char c) { return absl::ascii_isalnum(c) || c == '+' || c == '.' || c == '-'; }

// The scheme of a URL: "http" for "http://host"; empty if `text` has no scheme.
absl::string_view UrlScheme(absl::string_view text) {
  const size_t end = text.find("://");
  if (end == absl::string_view::npos || end == 0 || !absl::ascii_isalpha(text[0])) return "";
  const absl::string_view scheme = text.substr(0, end);
  return std::all_of(scheme.begin(), scheme.end(), IsSchemeCharacter) ? scheme : "";
}

std::string UrlProblem(absl::string_view scheme, absl::string_view rest) {
  const absl::string_view host = rest.substr(0, rest.find('/'));
  const size_t colon = host.rfind(':');
  const bool has_port = colon != absl::string_view::npos && IsNumber(host.substr(colon + 1));
  const std::string address = has_port ? std::string(host) : absl::StrCat(host, ":", kDefaultPort);
  const bool tls = absl::EqualsIgnoreCase(scheme, "https") || absl::EqualsIgnoreCase(scheme, "grpcs");
  return absl::StrCat("write the address without '", scheme, "://': '", address, "'",
                      tls ? ". TLS is used if a certificate authority is given: ca, or LOSSD_CA" : "");
}

// What is wrong with `address`, which should be "host:port"; empty if nothing is.
std::string AddressProblem(absl::string_view address) {
  if (const size_t slash = address.find('/'); slash != absl::string_view::npos) {
    return absl::StrCat("the address of a server has no path '", address.substr(slash), "': '",
                        address.substr(0, slash), "'");
  }
  if (std::count(address.begin(), address.end(), ':') > 1 && !absl::StartsWith(address, "[")) {
    return absl::StrCat("an IPv6 address stands in brackets: '[", address, "]:", kDefaultPort, "'");
  }
  const size_t colon = absl::EndsWith(address, "]") ? absl::string_view::npos : address.rfind(':');
  const absl::string_view port = colon == absl::string_view::npos ? "" : address.substr(colon + 1);
  if (port.empty()) {
    return absl::StrCat("it has no port; lossd's is ", kDefaultPort, " unless its --listen says otherwise: '",
                        absl::StripSuffix(address, ":"), ":", kDefaultPort, "'");
  }
  if (colon == 0) return absl::StrCat("it has no host: '127.0.0.1:", port, "' is this machine");
  if (PortOf(port) == 0) return absl::StrCat("its port '", port, "' is not a number from 1 to 65535");
  return "";
}

}  // namespace

std::string TargetProblem(absl::string_view target) {
  if (target.empty()) {
    return absl::StrCat("it must be not empty, but host:port, as in '127.0.0.1:", kDefaultPort, "'");
  }
  if (std::any_of(target.begin(), target.end(), [](char c) { return absl::ascii_isspace(c); })) {
    return "it has white space in it";
  }
  auto [scheme, rest] = SplitScheme(target);
  if (Has(kWithoutHost, scheme)) return "";
  if (scheme == "dns" && absl::ConsumePrefix(&rest, "//")) {  // skips the name server
    const size_t slash = rest.find('/');
    rest = slash == absl::string_view::npos ? "" : rest.substr(slash + 1);
  }
  if (const absl::string_view url = UrlScheme(rest); !url.empty()) {
    return UrlProblem(url, rest.substr(url.size() + 3));
  }
  for (const absl::string_view address : absl::StrSplit(rest, ',')) {
    if (std::string problem = AddressProblem(address); !problem.empty()) return problem;
  }
  return "";
}

HostAndPort HostAndPortOf(absl::string_view target) {
  const auto [scheme, rest] = SplitScheme(target);
  const size_t slash = rest.rfind('/');
  const absl::string_view address = slash == absl::string_view::npos ? rest : rest.substr(slash + 1);
  const size_t colon = address.rfind(':');
  if (Has(kWithoutHost, scheme) || colon == absl::string_view::npos || absl::StrContains(rest, ','))
    return {};
  absl::string_view host = address.substr(0, colon);
  const uint16_t port = PortOf(address.substr(colon + 1));
  if (host.empty() || port == 0) return {};
  absl::ConsumePrefix(&host, "[");
  absl::ConsumeSuffix(&host, "]");
  return {std::string(host), port};
}

std::string SocketPathOf(absl::string_view target) {
  const auto [scheme, rest] = SplitScheme(target);
  if (scheme != "unix") return "";
  if (!absl::StartsWith(rest, "/")) return std::string(rest);
  return absl::StrCat("/", rest.substr(std::min(rest.find_first_not_of('/'), rest.size())));
}

}  // namespace internal

bool IsLocalTarget(absl::string_view target) {
  if (absl::StartsWith(target, "unix:") || absl::StartsWith(target, "unix-abstract:")) return true;
  const std::string host = internal::HostAndPortOf(target).host;
  if (absl::EqualsIgnoreCase(host, "localhost")) return true;
  in_addr ipv4;
  in6_addr ipv6;
  if (inet_pton(AF_INET, host.c_str(), &ipv4) == 1) return (ntohl(ipv4.s_addr) >> 24) == 127;
  return inet_pton(AF_INET6, host.c_str(), &ipv6) == 1 && IN6_IS_ADDR_LOOPBACK(&ipv6);
}

}  // namespace lossd::client
