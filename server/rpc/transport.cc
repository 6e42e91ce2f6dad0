// SPDX-License-Identifier: Apache-2.0
// gRPC's limits, TLS credentials and messages (transport.h).
#include "server/rpc/transport.h"

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/support/log.h>
#include <grpcpp/resource_quota.h>

#include <algorithm>

#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "kernels/errors/field_error.h"
#include "server/log/log.h"

namespace lossd::rpc {
namespace {

int Milliseconds(absl::Duration duration) { return static_cast<int>(absl::ToInt64Milliseconds(duration)); }

// What a call may send ahead of the message that the server has asked for: 256 KiB of 256 MiB, so that the
// windows of as many calls as there may be take a fraction of the memory, and messages the rest.
int WindowBytes(int64_t transport_bytes) {
  return static_cast<int>(std::clamp<int64_t>(transport_bytes / 1024, 64 << 10, 16 << 20));
}

}  // namespace

void Configure(const TransportOptions& options, grpc::ServerBuilder* builder) {
  // Threads are those of gRPC's synchronous services, which are reflection alone.
  constexpr int kThreads = 32;
  grpc::ResourceQuota quota("lossd");
  quota.Resize(static_cast<size_t>(options.bytes)).SetMaxThreads(kThreads);
  builder->SetResourceQuota(quota);
  builder->SetMaxReceiveMessageSize(static_cast<int>(options.max_message_bytes));
  builder->SetMaxSendMessageSize(static_cast<int>(options.max_message_bytes));
  const auto set = [builder](const char* name, int value) { builder->AddChannelArgument(name, value); };
  set(GRPC_ARG_MAX_CONCURRENT_STREAMS, static_cast<int>(options.max_calls_per_connection));
  set(GRPC_ARG_MAX_METADATA_SIZE, 16 << 10);
  set(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, Milliseconds(options.handshake_timeout));
  set(GRPC_ARG_MAX_CONNECTION_IDLE_MS, Milliseconds(options.idle_connection_timeout));
  if (options.connection_age < absl::InfiniteDuration())
    set(GRPC_ARG_MAX_CONNECTION_AGE_MS, Milliseconds(options.connection_age));
  // Windows that gRPC adapts by itself grow to many MiB a call when a client sends faster than rows are
  // computed, until the memory is used up and calls are cancelled.
  set(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  // With the windows gRPC would also have grown the frames that clients send, from 16 KiB.
  set(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, 1 << 20);
  set(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, WindowBytes(options.bytes));
  // Peers that vanished without a word are noticed within a minute.
  set(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
  set(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20'000);
  // A client that pings more often than this while nothing is sent to it, twice beyond it, loses its
  // connection. Keepalives of a few seconds are usual; so many pings cost nothing.
  set(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 1'000);
  set(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 2);
}

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

namespace {

constexpr size_t kMaxMessageBytes = 500;

log::LogLevel LevelOf(gpr_log_severity severity) {
  switch (severity) {
    case GPR_LOG_SEVERITY_DEBUG:
      return log::LogLevel::kDebug;
    case GPR_LOG_SEVERITY_INFO:
      return log::LogLevel::kInfo;
    case GPR_LOG_SEVERITY_ERROR:
      break;
  }
  return log::LogLevel::kWarning;  // of a connection: the server goes on
}

void LogMessage(gpr_log_func_args* message) {
  static auto* const budget = new log::LineBudget(20);
  const std::optional<int64_t> left_out = budget->Take();
  if (!left_out.has_value()) return;
  log::Log(
      LevelOf(message->severity), "gRPC",
      {{"says", errors::Shortened(message->message, kMaxMessageBytes)}, {"messages_left_out", *left_out}});
}

}  // namespace

void LogGrpcMessages() { gpr_set_log_function(&LogMessage); }

}  // namespace lossd::rpc
