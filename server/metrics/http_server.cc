// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/http_server.h"

#include <arpa/inet.h>
#include <microhttpd.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/clocks/clock.h"
#include "server/metrics/http_certificates.h"
#include "server/metrics/http_connections.h"
#include "server/metrics/http_listener.h"

namespace lossd::metrics {
namespace {

// Fields of every answer. The pages load their script, style and icon from here and fetch from here; nothing
// is inline.
constexpr std::pair<const char*, const char*> kFields[] = {
    {MHD_HTTP_HEADER_CONNECTION, "close"},
    {MHD_HTTP_HEADER_CACHE_CONTROL, "no-store"},
    {"X-Content-Type-Options", "nosniff"},
    {"X-Frame-Options", "DENY"},
    {"Referrer-Policy", "no-referrer"},
    {"Content-Security-Policy",
     "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
     "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"},
    {"Cross-Origin-Resource-Policy", "same-origin"}};

// The address without the port.
std::string HostOf(const sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address->sa_family == AF_INET) {
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, text, sizeof(text));
  } else if (address->sa_family == AF_INET6) {
    inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr, text, sizeof(text));
  }
  return text;
}

MHD_Result CollectField(void* into, MHD_ValueKind, const char* name, const char* value) {
  auto* const request = static_cast<HttpRequest*>(into);
  const absl::string_view text = value == nullptr ? "" : value;
  if (absl::EqualsIgnoreCase(name, MHD_HTTP_HEADER_HOST)) request->hosts.push_back(text);
  if (absl::EqualsIgnoreCase(name, MHD_HTTP_HEADER_AUTHORIZATION)) request->authorizations.push_back(text);
  if (absl::EqualsIgnoreCase(name, MHD_HTTP_HEADER_ORIGIN)) request->origins.push_back(text);
  if (absl::EqualsIgnoreCase(name, "Sec-Fetch-Site")) request->fetch_sites.push_back(text);
  return MHD_YES;
}

MHD_Result CollectParameter(void* into, MHD_ValueKind, const char* name, const char* value) {
  auto* const request = static_cast<HttpRequest*>(into);
  request->parameters.emplace_back(name, value == nullptr ? "" : value);
  return MHD_YES;
}

std::string PeerOf(MHD_Connection* connection) {
  return HostOf(MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CLIENT_ADDRESS)->client_addr);
}

// Leaves %-escapes as they are.
size_t KeepEscapes(void*, MHD_Connection*, char* text) { return std::strlen(text); }

MHD_Result Send(MHD_Connection* connection, const HttpResponse& response) {
  MHD_Response* const answer = MHD_create_response_from_buffer(
      response.body.size(), const_cast<char*>(response.body.data()), MHD_RESPMEM_MUST_COPY);
  if (answer == nullptr) return MHD_NO;
  MHD_add_response_header(answer, MHD_HTTP_HEADER_CONTENT_TYPE, response.content_type.c_str());
  for (const auto& [name, value] : kFields) MHD_add_response_header(answer, name, value);
  if (response.status == MHD_HTTP_METHOD_NOT_ALLOWED) {
    MHD_add_response_header(answer, MHD_HTTP_HEADER_ALLOW, response.allow.c_str());
  }
  if (response.status == MHD_HTTP_UNAUTHORIZED) {
    MHD_add_response_header(answer, MHD_HTTP_HEADER_WWW_AUTHENTICATE, "Bearer");
  }
  const MHD_Result queued = MHD_queue_response(connection, static_cast<unsigned>(response.status), answer);
  MHD_destroy_response(answer);
  return queued;
}

class MicroHttpServer final : public HttpServer {
 public:
  MicroHttpServer(const HttpListener& listener, HttpHandlers handlers, HttpGuard guard,
                  std::unique_ptr<HttpCertificates> certificates)
      : address_(listener.address),
        audience_(listener.loopback ? HttpAudience::kLoopbackHosts : HttpAudience::kAnyHost),
        handlers_(std::move(handlers)),
        guard_(std::move(guard)),
        certificates_(std::move(certificates)) {}

  ~MicroHttpServer() override {
    if (daemon_ != nullptr) MHD_stop_daemon(daemon_);
  }

  // With poll and not epoll: a connection whose request ends in the middle is closed at once, while the
  // library's edge-triggered epoll may read the request, miss the end behind it and wait until the connection
  // times out. Takes the listening socket over. False if the thread cannot be started; then the socket is
  // still the caller's.
  bool Run(int listening) {
    // gnutls_certificate_retrieve_function2, which has no argument of its own.
    const MHD_OptionItem tls[] = {
        {MHD_OPTION_HTTPS_PRIORITIES, 0, const_cast<char*>("NORMAL:-VERS-ALL:+VERS-TLS1.2:+VERS-TLS1.3")},
        {MHD_OPTION_HTTPS_CERT_CALLBACK, 0, reinterpret_cast<void*>(&HttpCertificates::Retrieve)},
        {MHD_OPTION_END, 0, nullptr}};
    const unsigned flags = MHD_USE_POLL_INTERNAL_THREAD | MHD_USE_ITC;
    daemon_ = MHD_start_daemon(certificates_ != nullptr ? flags | MHD_USE_TLS : flags, 0, nullptr, nullptr,
                               &OnRequest, this,                                            //
                               MHD_OPTION_ARRAY, certificates_ != nullptr ? tls : tls + 2,  //
                               MHD_OPTION_LISTEN_SOCKET, listening,                         //
                               MHD_OPTION_THREAD_STACK_SIZE, kStackBytes,                   //
                               MHD_OPTION_CONNECTION_MEMORY_LIMIT, kRequestBytes,           //
                               MHD_OPTION_CONNECTION_LIMIT, kMostDescriptors,               //
                               MHD_OPTION_CONNECTION_TIMEOUT, kIdleSeconds,                 //
                               MHD_OPTION_STRICT_FOR_CLIENT, 1,                             //
                               MHD_OPTION_UNESCAPE_CALLBACK, &KeepEscapes, nullptr,         //
                               MHD_OPTION_NOTIFY_CONNECTION, &OnConnection, this,           //
                               MHD_OPTION_END);
    return daemon_ != nullptr;
  }

  std::string address() const override { return address_; }

 private:
  // Called when the header of a request is complete. The answer is queued at once, so that a body is not
  // read.
  static MHD_Result OnRequest(void* self, MHD_Connection* connection, const char* target, const char* method,
                              const char* version, const char*, size_t*, void**) {
    const auto* server = static_cast<const MicroHttpServer*>(self);
    HttpRequest request = {.method = method, .target = target, .version = version};
    request.peer = PeerOf(connection);
    MHD_get_connection_values(connection, MHD_HEADER_KIND, &CollectField, &request);
    MHD_get_connection_values(connection, MHD_GET_ARGUMENT_KIND, &CollectParameter, &request);
    return Send(connection, Route(request, server->handlers_, server->audience_, server->guard_));
  }

  // Called on the server's thread when a connection opens or closes; `context` is the connection's own.
  static void OnConnection(void* self, MHD_Connection* connection, void** context,
                           MHD_ConnectionNotificationCode code) {
    auto* const server = static_cast<MicroHttpServer*>(self);
    HttpConnections& connections = server->connections_;
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
      if (server->certificates_ != nullptr) server->certificates_->ServeThisThread();
      *context = new HttpConnections::Handle(Enter(connections, connection));
    } else {
      const auto* handle = static_cast<HttpConnections::Handle*>(*context);
      connections.Remove(*handle);
      delete handle;
    }
  }

  static HttpConnections::Handle Enter(HttpConnections& connections, MHD_Connection* connection) {
    // Copied before the address is asked for: libmicrohttpd 1.0 returns both in the same place.
    const int descriptor = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
    std::vector<int> drop;
    const HttpConnections::Handle handle =
        connections.Add(descriptor, PeerOf(connection), clocks::SteadyNow(), &drop);
    // The library sees the end of such a connection, and closes it.
    for (const int dropped : drop) shutdown(dropped, SHUT_RDWR);
    return handle;
  }

  const std::string address_;
  const HttpAudience audience_;
  const HttpHandlers handlers_;
  const HttpGuard guard_;
  const std::unique_ptr<HttpCertificates> certificates_;  // null: plain HTTP
  HttpConnections connections_{HttpConnectionLimits{}};   // of the server's thread alone
  MHD_Daemon* daemon_ = nullptr;
};

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(absl::string_view address,
                                                              HttpHandlers handlers, HttpSecurity security) {
  std::unique_ptr<HttpCertificates> certificates;
  if (security.tls != nullptr) {
    auto created = HttpCertificates::Create(security.tls);
    if (!created.ok()) return created.status();
    certificates = *std::move(created);
  }
  absl::StatusOr<HttpListener> listener = ListenForHttp(address);
  if (!listener.ok()) return listener.status();
  auto server = std::make_unique<MicroHttpServer>(*listener, std::move(handlers), std::move(security.guard),
                                                  std::move(certificates));
  if (!server->Run(listener->descriptor)) {
    close(listener->descriptor);
    return absl::UnavailableError(absl::StrCat("cannot start the thread for HTTP on ", address));
  }
  return server;
}

}  // namespace lossd::metrics
