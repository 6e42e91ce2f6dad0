#include "client/cpp/tls_probe.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace lossd::client::internal {
namespace {

constexpr timeval kPatience = {.tv_sec = 2, .tv_usec = 0};

struct Free {
  void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
  void operator()(SSL* ssl) const { SSL_free(ssl); }
  void operator()(BIO* bio) const { BIO_free(bio); }
  void operator()(X509* certificate) const { X509_free(certificate); }
};

class Socket {
 public:
  // Connects; descriptor() is negative if that fails.
  Socket(const std::string& host, const std::string& port) {
    const addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    addrinfo* addresses = nullptr;
    if (getaddrinfo(host.c_str(), port.c_str(), &hints, &addresses) != 0) return;
    for (const addrinfo* next = addresses; next != nullptr && descriptor_ < 0; next = next->ai_next) {
      Connect(*next);
    }
    freeaddrinfo(addresses);
  }
  ~Socket() { Close(); }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  int descriptor() const { return descriptor_; }

 private:
  void Connect(const addrinfo& address) {
    descriptor_ = socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC, address.ai_protocol);
    if (descriptor_ < 0) return;
    setsockopt(descriptor_, SOL_SOCKET, SO_RCVTIMEO, &kPatience, sizeof(kPatience));
    setsockopt(descriptor_, SOL_SOCKET, SO_SNDTIMEO, &kPatience, sizeof(kPatience));
    if (connect(descriptor_, address.ai_addr, address.ai_addrlen) != 0) Close();
  }
  void Close() {
    if (descriptor_ >= 0) close(descriptor_);
    descriptor_ = -1;
  }

  int descriptor_ = -1;
};

// "[::1]:7070" as "::1" and "7070"; empty for targets that are not of this kind.
std::pair<std::string, std::string> SplitTarget(absl::string_view target) {
  for (const absl::string_view scheme : {"dns:///", "dns:", "ipv4:", "ipv6:"}) {
    if (absl::ConsumePrefix(&target, scheme)) break;
  }
  const size_t colon = target.rfind(':');
  if (colon == absl::string_view::npos || absl::StartsWith(target, "unix")) return {};
  absl::string_view host = target.substr(0, colon);
  if (absl::ConsumePrefix(&host, "[")) absl::ConsumeSuffix(&host, "]");
  return {std::string(host), std::string(target.substr(colon + 1))};
}

void AddAuthorities(SSL_CTX* context, const std::string& pem) {
  const std::unique_ptr<BIO, Free> bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
  while (const auto certificate =
             std::unique_ptr<X509, Free>(PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr))) {
    X509_STORE_add_cert(SSL_CTX_get_cert_store(context), certificate.get());
  }
  ERR_clear_error();
}

// An HTTP/2 server says its settings first, without being asked: a frame of type 4 for stream 0.
bool IsSettingsFrame(absl::string_view bytes) {
  return bytes.size() >= 9 && bytes[0] == 0 && bytes[3] == 4 &&
         bytes.substr(5, 4) == absl::string_view("\0\0\0\0", 4);
}

bool SpeaksPlain(const std::string& host, const std::string& port) {
  const Socket socket(host, port);
  if (socket.descriptor() < 0) return false;
  constexpr absl::string_view kPreface("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0", 33);
  if (send(socket.descriptor(), kPreface.data(), kPreface.size(), MSG_NOSIGNAL) < 0) return false;
  char answer[9];
  const ssize_t count = recv(socket.descriptor(), answer, sizeof(answer), MSG_WAITALL);
  return count > 0 && IsSettingsFrame({answer, static_cast<size_t>(count)});
}

}  // namespace

TlsProbe ProbeTls(const std::string& target, const std::string& authorities) {
  const auto [host, port] = SplitTarget(target);
  if (host.empty()) return {};
  if (SpeaksPlain(host, port)) return {.speech = Speech::kPlain, .distrust = ""};
  const Socket socket(host, port);
  if (socket.descriptor() < 0) return {};
  const std::unique_ptr<SSL_CTX, Free> context(SSL_CTX_new(TLS_client_method()));
  AddAuthorities(context.get(), authorities);
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_NONE, nullptr);  // it goes on, and the result can be asked for
  const std::unique_ptr<SSL, Free> ssl(SSL_new(context.get()));
  constexpr unsigned char kHttp2[] = {2, 'h', '2'};
  SSL_set_alpn_protos(ssl.get(), kHttp2, sizeof(kHttp2));
  X509_VERIFY_PARAM* const wanted = SSL_get0_param(ssl.get());
  if (X509_VERIFY_PARAM_set1_ip_asc(wanted, host.c_str()) != 1) {
    X509_VERIFY_PARAM_set1_host(wanted, host.c_str(), host.size());
    SSL_set_tlsext_host_name(ssl.get(), host.c_str());
  }
  SSL_set_fd(ssl.get(), socket.descriptor());
  SSL_connect(ssl.get());
  ERR_clear_error();
  const std::unique_ptr<X509, Free> certificate(SSL_get1_peer_certificate(ssl.get()));
  if (certificate == nullptr) return {};
  const long verified = SSL_get_verify_result(ssl.get());  // NOLINT(google-runtime-int)
  return {.speech = Speech::kTls,
          .distrust = verified == X509_V_OK ? "" : X509_verify_cert_error_string(verified)};
}

}  // namespace lossd::client::internal
