// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/probe_tls.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

#include <cerrno>
#include <csignal>
#include <ctime>
#include <memory>

#include "client/cpp/probe_socket.h"

namespace lossd::client::internal {
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

// Instead of asking whoever sits at the terminal.
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
  // Reasons above this number are alerts of the other side; anything else says that its words are not TLS.
  const int reason = ERR_GET_REASON(ERR_peek_error());
  return reason > SSL_AD_REASON_OFFSET ? TlsEnd::kRefused : TlsEnd::kNoTls;
}

// Negative with EAGAIN if nothing comes in time, as recv() does it.
std::ptrdiff_t Receive(SSL* ssl, char* bytes, size_t count) {
  const int result = SSL_read(ssl, bytes, static_cast<int>(count));
  if (result > 0) return result;
  const int error = SSL_get_error(ssl, result);
  errno = error == SSL_ERROR_WANT_READ ? EAGAIN : EIO;
  return error == SSL_ERROR_ZERO_RETURN ? 0 : -1;
}

// Keeps OpenSSL's writes to a connection that is closed from ending the program, in this thread.
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
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_NONE, nullptr);  // it goes on, and the result can be asked for
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
