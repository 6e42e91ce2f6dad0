// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/tls_credentials.h"

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>

#include "absl/synchronization/mutex.h"
#include "server/access/handshake_guard.h"

namespace lossd::rpc {
namespace {

grpc_ssl_client_certificate_request_type RequestType(ClientCertificates clients) {
  switch (clients) {
    case ClientCertificates::kNone:
      return GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE;
    case ClientCertificates::kOptional:
      return GRPC_SSL_REQUEST_CLIENT_CERTIFICATE_AND_VERIFY;
    case ClientCertificates::kRequired:
      break;
  }
  return GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY;
}

// gRPC's C++ interface takes certificates once, or watches files without a look at what is in them. Its C
// interface asks for them before each handshake, which is what is wanted here.
class FetchingCredentials final : public grpc::ServerCredentials {
 public:
  FetchingCredentials(access::ReloadedTls* material, ClientCertificates clients) : material_(material) {
    grpc_ssl_server_credentials_options* const options =
        grpc_ssl_server_credentials_create_options_using_config_fetcher(RequestType(clients), &Fetch, this);
    credentials_ = grpc_ssl_server_credentials_create_with_options(options);
  }
  ~FetchingCredentials() override { grpc_server_credentials_release(credentials_); }

  // Calls are admitted by AccessControl, which knows the peer's address too.
  void SetAuthMetadataProcessor(const std::shared_ptr<grpc::AuthMetadataProcessor>&) override {}

 private:
  int AddPortToServer(const std::string& address, grpc_server* server) override {
    return grpc_server_add_http2_port(server, address.c_str(), credentials_);
  }

  static grpc_ssl_certificate_config_reload_status Fetch(void* self,
                                                         grpc_ssl_server_certificate_config** config) {
    return static_cast<FetchingCredentials*>(self)->FetchNew(config);
  }
  grpc_ssl_certificate_config_reload_status FetchNew(grpc_ssl_server_certificate_config** config)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    std::shared_ptr<const access::TlsMaterial> current = material_->Get();
    if (current == handed_out_) return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    const grpc_ssl_pem_key_cert_pair pair = {.private_key = current->key.c_str(),
                                             .cert_chain = current->certificate_chain.c_str()};
    // gRPC insists on authorities, even where clients are not asked for certificates.
    const std::string& authorities =
        current->client_authorities.empty() ? current->certificate_chain : current->client_authorities;
    *config = grpc_ssl_server_certificate_config_create(authorities.c_str(), &pair, 1);
    handed_out_ = std::move(current);
    return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
  }

  access::ReloadedTls* const material_;
  grpc_server_credentials* credentials_ = nullptr;
  absl::Mutex mutex_;
  std::shared_ptr<const access::TlsMaterial> handed_out_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

std::shared_ptr<grpc::ServerCredentials> TlsCredentials(access::ReloadedTls* material,
                                                        ClientCertificates clients) {
  access::GuardHandshakes();
  return std::make_shared<FetchingCredentials>(material, clients);
}

}  // namespace lossd::rpc
