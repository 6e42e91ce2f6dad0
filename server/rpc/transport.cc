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

// The flow-control window of a call: the bytes that its client may send before the server asks for a message.
// 1/1024 of the memory (256 KiB of 256 MiB), so that even with the most calls the windows take only a part of
// the memory, and leave the rest for messages.
int WindowBytes(int64_t transport_bytes) {
  return static_cast<int>(std::clamp<int64_t>(transport_bytes / 1024, 64 << 10, 16 << 20));
}

}  // namespace

void Configure(const TransportOptions& options, grpc::ServerBuilder* builder) {
  // The limit on threads is for gRPC's synchronous services; reflection is the only one.
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
  // Turns off windows that gRPC adapts by itself. They grow to many MiB per call when a client sends faster
  // than rows are computed, until the memory is used up and calls are cancelled.
  set(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  // Together with the windows, gRPC would also have enlarged the frames that clients send, from 16 KiB. So
  // the size is set here.
  set(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, 1 << 20);
  set(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, WindowBytes(options.bytes));
  // Finds within a minute that a peer has vanished without closing its connection.
  set(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
  set(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20'000);
  // The shortest interval between pings of a client to which nothing is sent. A client that exceeds this more
  // than twice loses its connection. Clients often send keepalives every few seconds, which costs almost
  // nothing.
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

// Server credentials that ask `material` for certificates before each handshake. gRPC's C++ interface takes
// certificates only once, or watches files without checking their content; so this class uses gRPC's C
// interface.
class FetchingCredentials final : public grpc::ServerCredentials {
 public:
  FetchingCredentials(access::ReloadedTls* material, ClientCertificates clients) : material_(material) {
    grpc_ssl_server_credentials_options* const options =
        grpc_ssl_server_credentials_create_options_using_config_fetcher(RequestType(clients), &Fetch, this);
    credentials_ = grpc_ssl_server_credentials_create_with_options(options);
  }
  ~FetchingCredentials() override { grpc_server_credentials_release(credentials_); }

  // Not used: AccessControl admits calls, and knows the peer's address too.
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
    // gRPC requires authorities, even if clients are not asked for certificates.
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
  return log::LogLevel::kWarning;  // an error of gRPC concerns one connection; the server goes on
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
