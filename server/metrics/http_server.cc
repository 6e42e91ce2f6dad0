// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/http_server.h"

#include <arpa/inet.h>
#include <microhttpd.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>
#include <memory>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/clocks/clock.h"
#include "server/connections/closer.h"
#include "server/connections/connection_acceptor.h"
#include "server/log/log.h"
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

connections::EntranceOptions Limits(HttpOnLimit on_limit) {
  connections::EntranceOptions limits{.in_all = HttpServer::kMostConnections,
                                      .per_peer = HttpServer::kMostPerPeer,
                                      .oldest_makes_room = true,
                                      .age = HttpServer::kAge};
  if (on_limit != nullptr) {
    limits.on_refused = [on_limit = std::move(on_limit)](int, absl::string_view reason,
                                                         const connections::Peer& peer) {
      on_limit(reason == connections::kMaxPerPeer ? kHttpConnectionsPerAddress : kHttpConnections, peer.name);
    };
  }
  return limits;
}

}  // namespace

struct HttpServer::Callbacks {
  // Called when the header of a request is complete. The answer is queued at once, so that a body is not
  // read.
  static MHD_Result OnRequest(void* self, MHD_Connection* connection, const char* target, const char* method,
                              const char* version, const char*, size_t*, void**) {
    const auto* server = static_cast<const HttpServer*>(self);
    HttpRequest request = {.method = method, .target = target, .version = version};
    request.peer = PeerOf(connection);
    MHD_get_connection_values(connection, MHD_HEADER_KIND, &CollectField, &request);
    MHD_get_connection_values(connection, MHD_GET_ARGUMENT_KIND, &CollectParameter, &request);
    return Send(connection, Route(request, server->handlers_, server->audience_, server->guard_));
  }

  // Called on the server's thread when a connection opens, and before one is closed.
  static void OnConnection(void* self, MHD_Connection* connection, void**,
                           MHD_ConnectionNotificationCode code) {
    auto* const server = static_cast<HttpServer*>(self);
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
      if (server->certificates_ != nullptr) server->certificates_->ServeThisThread();
      return;
    }
    server->acceptor_->Closing(
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd);
  }
};

HttpServer::HttpServer(HttpListener listener, HttpHandlers handlers, HttpGuard guard,
                       std::unique_ptr<HttpCertificates> certificates, HttpOnLimit on_limit)
    : address_(std::move(listener.address)),
      audience_(listener.loopback ? HttpAudience::kLoopbackHosts : HttpAudience::kAnyHost),
      handlers_(std::move(handlers)),
      guard_(std::move(guard)),
      certificates_(std::move(certificates)),
      acceptor_(std::make_unique<connections::ConnectionAcceptor>(std::move(listener.sockets),
                                                                  Limits(std::move(on_limit)))) {}

HttpServer::~HttpServer() {
  acceptor_->Stop();
  if (daemon_ != nullptr) MHD_stop_daemon(daemon_);
}

// With poll and not epoll: a connection whose request ends in the middle is closed at once, while the
// library's edge-triggered epoll may read the request, miss the end behind it and wait until the connection
// times out.
bool HttpServer::Run() {
  // gnutls_certificate_retrieve_function2, which has no argument of its own.
  const MHD_OptionItem tls[] = {
      {MHD_OPTION_HTTPS_PRIORITIES, 0, const_cast<char*>("NORMAL:-VERS-ALL:+VERS-TLS1.2:+VERS-TLS1.3")},
      {MHD_OPTION_HTTPS_CERT_CALLBACK, 0, reinterpret_cast<void*>(&HttpCertificates::Retrieve)},
      {MHD_OPTION_END, 0, nullptr}};
  const unsigned flags = MHD_USE_POLL_INTERNAL_THREAD | MHD_USE_ITC | MHD_USE_NO_LISTEN_SOCKET;
  daemon_ = MHD_start_daemon(certificates_ != nullptr ? flags | MHD_USE_TLS : flags, 0, nullptr, nullptr,
                             &Callbacks::OnRequest, this,                                   //
                             MHD_OPTION_ARRAY, certificates_ != nullptr ? tls : tls + 2,    //
                             MHD_OPTION_THREAD_STACK_SIZE, kStackBytes,                     //
                             MHD_OPTION_CONNECTION_MEMORY_LIMIT, kRequestBytes,             //
                             MHD_OPTION_CONNECTION_LIMIT, kLibraryConnections,              //
                             MHD_OPTION_CONNECTION_TIMEOUT, kIdleSeconds,                   //
                             MHD_OPTION_STRICT_FOR_CLIENT, 1,                               //
                             MHD_OPTION_UNESCAPE_CALLBACK, &KeepEscapes, nullptr,           //
                             MHD_OPTION_NOTIFY_CONNECTION, &Callbacks::OnConnection, this,  //
                             MHD_OPTION_END);
  if (daemon_ == nullptr) return false;
  acceptor_->Start([this](int, int connection) { Take(connection); });
  return true;
}

void HttpServer::Take(int connection) {
  sockaddr_storage from = {};
  socklen_t size = sizeof(from);
  auto* const address = reinterpret_cast<sockaddr*>(&from);
  if (getpeername(connection, address, &size) == 0) {
    if (MHD_add_connection(daemon_, connection, address, size) != MHD_YES) acceptor_->Closing(connection);
    return;
  }
  acceptor_->Closing(connection);  // its client has gone already
  connections::CloseElsewhere(wire::OwnedDescriptor(connection));
}

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(absl::string_view address,
                                                              HttpHandlers handlers, HttpSecurity security,
                                                              HttpOnLimit on_limit) {
  std::unique_ptr<HttpCertificates> certificates;
  if (security.tls != nullptr) {
    auto created = HttpCertificates::Create(security.tls);
    if (!created.ok()) return created.status();
    certificates = *std::move(created);
  }
  absl::StatusOr<HttpListener> listener = ListenForHttp(address);
  if (!listener.ok()) return listener.status();
  auto server =
      absl::WrapUnique(new HttpServer(*std::move(listener), std::move(handlers), std::move(security.guard),
                                      std::move(certificates), std::move(on_limit)));
  if (!server->Run())
    return absl::UnavailableError(absl::StrCat("cannot start the thread for HTTP on ", address));
  return server;
}

namespace {

constexpr unsigned kMaxChain = 16;

thread_local HttpCertificates* of_this_thread = nullptr;

// GnuTLS does not write through the pointer.
gnutls_datum_t Datum(const std::string& text) {
  return {.data = reinterpret_cast<unsigned char*>(const_cast<char*>(text.data())),
          .size = static_cast<unsigned>(text.size())};
}

}  // namespace

struct HttpCertificates::Parsed {
  Parsed() = default;
  ~Parsed() {
    for (unsigned i = 0; i < count; ++i) gnutls_pcert_deinit(&chain[i]);
    if (key != nullptr) gnutls_privkey_deinit(key);
  }
  Parsed(const Parsed&) = delete;
  Parsed& operator=(const Parsed&) = delete;

  gnutls_pcert_st chain[kMaxChain];
  unsigned count = 0;
  gnutls_privkey_t key = nullptr;
  absl::Time replaced = absl::InfiniteFuture();
};

absl::StatusOr<std::unique_ptr<HttpCertificates>> HttpCertificates::Create(access::ReloadedTls* material) {
  std::unique_ptr<HttpCertificates> certificates(new HttpCertificates(material));
  certificates->seen_ = material->Get();
  if (absl::Status status = certificates->Parse(certificates->seen_); !status.ok()) return status;
  return certificates;
}

HttpCertificates::HttpCertificates(access::ReloadedTls* material) : material_(material) {}

HttpCertificates::~HttpCertificates() = default;

void HttpCertificates::ServeThisThread() { of_this_thread = this; }

absl::Status HttpCertificates::Parse(const std::shared_ptr<const access::TlsMaterial>& material) {
  auto parsed = std::make_unique<Parsed>();
  const gnutls_datum_t chain = Datum(material->certificate_chain);
  const gnutls_datum_t key = Datum(material->key);
  unsigned count = kMaxChain;
  int error = gnutls_pcert_list_import_x509_raw(parsed->chain, &count, &chain, GNUTLS_X509_FMT_PEM, 0);
  if (error < 0)
    return absl::InvalidArgumentError(absl::StrCat("tls_cert: GnuTLS says: ", gnutls_strerror(error)));
  parsed->count = count;
  error = gnutls_privkey_init(&parsed->key);
  if (error == 0) error = gnutls_privkey_import_x509_raw(parsed->key, &key, GNUTLS_X509_FMT_PEM, nullptr, 0);
  if (error < 0)
    return absl::InvalidArgumentError(absl::StrCat("tls_key: GnuTLS says: ", gnutls_strerror(error)));
  const absl::Time now = clocks::SteadyNow();
  if (!parsed_.empty()) parsed_.back()->replaced = now;
  parsed_.push_back(std::move(parsed));
  while (parsed_.front()->replaced + kKept < now) parsed_.pop_front();
  return absl::OkStatus();
}

const HttpCertificates::Parsed& HttpCertificates::Current() {
  const std::shared_ptr<const access::TlsMaterial> now = material_->Get();
  if (now != seen_) {
    seen_ = now;
    if (absl::Status status = Parse(now); !status.ok()) {
      log::Log(log::LogLevel::kError, "HTTP keeps its earlier certificate", {{"error", status.message()}});
    }
  }
  return *parsed_.back();
}

int HttpCertificates::Retrieve(gnutls_session_t, const gnutls_datum_t*, int, const gnutls_pk_algorithm_t*,
                               int, gnutls_pcert_st** certificates, unsigned* certificate_count,
                               gnutls_privkey_t* key) {
  if (of_this_thread == nullptr) return -1;
  const Parsed& current = of_this_thread->Current();
  *certificates = const_cast<gnutls_pcert_st*>(current.chain);
  *certificate_count = current.count;
  *key = current.key;
  return 0;
}

}  // namespace lossd::metrics
