// SPDX-License-Identifier: Apache-2.0
// The HTTP server of a lossd server: how it routes requests, its connections, and its pages (http_server.h).
#include "server/metrics/http_server.h"

#include <arpa/inet.h>
#include <microhttpd.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>

#include "absl/cleanup/cleanup.h"
#include "absl/memory/memory.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"
#include "server/access/closer.h"
#include "server/access/connection_acceptor.h"
#include "server/log/log.h"

namespace lossd::metrics {
namespace {

std::optional<int> ParsePort(absl::string_view text) {
  int value = 0;
  if (text.empty() || !std::all_of(text.begin(), text.end(), absl::ascii_isdigit)) return std::nullopt;
  if (!absl::SimpleAtoi(text, &value) || value > 65535) return std::nullopt;
  return value;
}

// Whether `host` is a loopback address; nullopt if it is not an address.
std::optional<bool> ParseHost(absl::string_view host) {
  if (absl::ConsumePrefix(&host, "[")) {
    in6_addr ipv6 = {};
    if (!absl::ConsumeSuffix(&host, "]") || inet_pton(AF_INET6, std::string(host).c_str(), &ipv6) != 1)
      return std::nullopt;
    return IN6_IS_ADDR_LOOPBACK(&ipv6);
  }
  in_addr ipv4 = {};
  if (inet_pton(AF_INET, std::string(host).c_str(), &ipv4) != 1) return std::nullopt;
  return (ntohl(ipv4.s_addr) >> 24) == IN_LOOPBACKNET;
}

}  // namespace

absl::StatusOr<HttpListener> ListenForHttp(absl::string_view address) {
  const size_t colon = std::min(address.rfind(':'), address.size());
  const absl::string_view host = address.substr(0, colon);
  const std::optional<bool> loopback = ParseHost(host);
  const std::optional<int> port =
      colon == address.size() ? std::nullopt : ParsePort(address.substr(colon + 1));
  if (!loopback.has_value() || !port.has_value())
    return errors::FieldError("http address", "be <IP address>:<port>", address);
  absl::StatusOr<std::vector<access::ListeningSocket>> sockets =
      access::ListeningSocket::OpenTcp(std::string(host), *port);
  if (!sockets.ok()) {
    return absl::UnavailableError(
        absl::StrCat("http: ", sockets.status().message(), " (is the port taken?)"));
  }
  const int chosen = sockets->front().port();
  return HttpListener{
      .sockets = *std::move(sockets), .address = absl::StrCat(host, ":", chosen), .loopback = *loopback};
}

namespace {

struct Target {
  std::optional<absl::string_view> host;  // set if the target is in absolute form
  absl::string_view path;
};

Target ParseTarget(absl::string_view target) {
  constexpr absl::string_view kScheme = "http://";
  if (!absl::StartsWithIgnoreCase(target, kScheme)) return {.path = target};
  target.remove_prefix(kScheme.size());
  const size_t slash = std::min(target.find('/'), target.size());
  const absl::string_view path = target.substr(slash);
  return {.host = target.substr(0, slash), .path = path.empty() ? "/" : path};
}

// Returns the handler of the path, or end(), and the part of the path behind the handler's prefix.
std::pair<HttpHandlers::const_iterator, absl::string_view> FindHandler(const HttpHandlers& handlers,
                                                                       absl::string_view path) {
  const size_t name = path.rfind('/') + 1;  // 0 if there is no slash
  const bool of_prefix = name > 1 && name < path.size();
  const auto exact = handlers.find(path);
  if (exact != handlers.end() && (path == "/" || name < path.size())) return {exact, ""};
  return of_prefix ? std::make_pair(handlers.find(path.substr(0, name)), path.substr(name))
                   : std::make_pair(handlers.end(), absl::string_view());
}

bool IsPort(absl::string_view text) {
  int port = 0;
  return !text.empty() && text.size() <= 5 && std::all_of(text.begin(), text.end(), absl::ascii_isdigit) &&
         absl::SimpleAtoi(text, &port) && port <= 65535;
}

bool IsLoopbackIpv4(absl::string_view host) {
  in_addr address;
  return inet_pton(AF_INET, std::string(host).c_str(), &address) == 1 && (ntohl(address.s_addr) >> 24) == 127;
}

bool IsLoopbackIpv6(absl::string_view host) {
  in6_addr address;
  return inet_pton(AF_INET6, std::string(host).c_str(), &address) == 1 && IN6_IS_ADDR_LOOPBACK(&address);
}

// The host of an origin, for example "127.0.0.1:7071" of "http://127.0.0.1:7071". nullopt for "null", the
// origin of sandboxed pages and files.
std::optional<absl::string_view> HostOfOrigin(absl::string_view origin) {
  const bool url = absl::ConsumePrefix(&origin, "http://") || absl::ConsumePrefix(&origin, "https://");
  return url ? std::make_optional(origin) : std::nullopt;
}

}  // namespace

bool IsOfAnotherPage(const HttpRequest& request) {
  if (!request.fetch_sites.empty()) {
    return !std::all_of(request.fetch_sites.begin(), request.fetch_sites.end(),
                        [](absl::string_view site) { return site == "same-origin" || site == "none"; });
  }
  return std::any_of(request.origins.begin(), request.origins.end(), [&](absl::string_view origin) {
    const std::optional<absl::string_view> host = HostOfOrigin(origin);
    return !host.has_value() || request.hosts.empty() ||
           !absl::EqualsIgnoreCase(*host, request.hosts.front());
  });
}

bool NamesLoopback(absl::string_view host) {
  const size_t name_end = absl::StartsWith(host, "[") ? host.find(']') : 0;
  if (name_end == absl::string_view::npos) return false;
  const size_t colon = host.find(':', name_end);
  if (colon != absl::string_view::npos) {
    if (!IsPort(host.substr(colon + 1))) return false;
    host = host.substr(0, colon);
  }
  if (absl::ConsumePrefix(&host, "[")) return absl::ConsumeSuffix(&host, "]") && IsLoopbackIpv6(host);
  return absl::EqualsIgnoreCase(host, "localhost") || IsLoopbackIpv4(host);
}

HttpResponse Route(const HttpRequest& request, const HttpHandlers& handlers, HttpAudience audience,
                   const HttpGuard& guard) {
  const size_t least_hosts = request.version == "HTTP/1.0" ? 0 : 1;
  if (request.hosts.size() > 1 || request.hosts.size() < least_hosts) {
    return {.status = 400, .body = "a request has exactly one Host\n"};
  }
  const Target target = ParseTarget(request.target);
  std::optional<absl::string_view> host = target.host;
  if (!host.has_value() && !request.hosts.empty()) host = request.hosts.front();
  if (audience == HttpAudience::kLoopbackHosts && host.has_value() && !NamesLoopback(*host)) {
    return {.status = 403,
            .body = "this server listens on the loopback and answers for loopback hosts only\n"};
  }
  const auto [found, rest] = FindHandler(handlers, target.path);
  const bool changes = found != handlers.end() && found->second.effect == HttpHandler::Effect::kChanges;
  if (changes ? request.method != "POST" : request.method != "GET" && request.method != "HEAD") {
    const std::string methods = changes ? "POST" : "GET, HEAD";
    return {.status = 405, .body = absl::StrCat("only ", methods, "\n"), .allow = methods};
  }
  if (found == handlers.end()) return {.status = 404, .body = "not found\n"};
  if (changes && IsOfAnotherPage(request)) {
    return {.status = 403, .body = absl::StrCat(target.path, " is not for pages of other web sites\n")};
  }
  if (guard != nullptr) {
    if (std::optional<HttpResponse> refusal = guard(request, target.path); refusal.has_value())
      return *std::move(refusal);
  }
  return found->second.function({.rest = rest, .parameters = request.parameters});
}

namespace {

// Header fields of every answer. The content security policy allows what the pages need: script, style, icon
// and fetches from this server, and nothing inline.
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

// A function for the library that does not decode %-escapes.
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

access::EntranceOptions Limits(HttpOnLimit on_limit) {
  access::EntranceOptions limits{.in_all = HttpServer::kMostConnections,
                                 .per_peer = HttpServer::kMostPerPeer,
                                 .oldest_makes_room = true,
                                 .age = HttpServer::kAge};
  if (on_limit != nullptr) {
    limits.on_refused = [on_limit = std::move(on_limit)](int, absl::string_view reason,
                                                         const access::Peer& peer) {
      on_limit(reason == access::kMaxPerPeer ? kHttpConnectionsPerAddress : kHttpConnections, peer.name);
    };
  }
  return limits;
}

}  // namespace

struct HttpServer::Callbacks {
  // Called when the header of a request is complete. Queues the answer at once, so that the library does not
  // read a body.
  static MHD_Result OnRequest(void* self, MHD_Connection* connection, const char* target, const char* method,
                              const char* version, const char*, size_t*, void**) {
    auto* const server = static_cast<HttpServer*>(self);
    server->handler_begins_.Beat();
    server->handler_runs_ = true;
    const auto runs = absl::MakeCleanup([server] { server->handler_runs_ = false; });
    HttpRequest request = {.method = method, .target = target, .version = version};
    request.peer = PeerOf(connection);
    request.peer_name = server->acceptor_->NameOf(
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd);
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
      acceptor_(std::make_unique<access::ConnectionAcceptor>(std::move(listener.sockets),
                                                             Limits(std::move(on_limit)))) {}

HttpServer::~HttpServer() {
  acceptor_->Stop();
  if (daemon_ != nullptr) MHD_stop_daemon(daemon_);
}

absl::Duration HttpServer::Silence() const {
  const absl::Duration handler = handler_runs_ ? handler_begins_.Silence() : absl::ZeroDuration();
  return std::max(acceptor_->Silence(), handler);
}

// Uses poll instead of epoll. If a client sends part of a request and closes, poll closes the connection at
// once. The library's edge-triggered epoll may read the part, miss the end behind it, and wait until the
// connection times out.
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
  acceptor_->Start("lossd-accept-h", [this](int, int connection) { Take(connection); });
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
  acceptor_->Closing(connection);  // the client has disconnected already
  access::CloseElsewhere(wire::OwnedDescriptor(connection));
}

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(absl::string_view address,
                                                              HttpHandlers handlers, HttpSecurity security,
                                                              HttpOnLimit on_limit) {
  std::unique_ptr<HttpCertificates> certificates;
  if (security.tls != nullptr) {
    LOSSD_TRY(certificates, HttpCertificates::Create(security.tls));
  }
  LOSSD_TRY(HttpListener listener, ListenForHttp(address));
  auto server =
      absl::WrapUnique(new HttpServer(std::move(listener), std::move(handlers), std::move(security.guard),
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
  LOSSD_RETURN_IF_ERROR(certificates->Parse(certificates->seen_));
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

namespace {

constexpr absl::string_view kHtml = "text/html; charset=utf-8";
constexpr absl::string_view kJson = "application/json";

HttpResponse Page(std::string html, int status = 200) {
  return {.status = status, .content_type = std::string(kHtml), .body = std::move(html)};
}

HttpResponse Json(std::string text) { return {.content_type = std::string(kJson), .body = std::move(text)}; }

HttpResponse BadRequest(const absl::Status& status) {
  return {.status = 400, .body = absl::StrCat(status.message(), "\n")};
}

// The parameters of a request. It may have only `known` parameters, each at most once.
class Parameters {
 public:
  static absl::StatusOr<Parameters> Read(const HttpCall& call,
                                         std::initializer_list<absl::string_view> known) {
    Parameters parameters;
    for (const auto& [name, value] : call.parameters) {
      if (std::find(known.begin(), known.end(), name) == known.end()) {
        return errors::FieldError("parameter", absl::StrCat("be one of ", absl::StrJoin(known, ", ")), name);
      }
      if (!parameters.values_.emplace(name, value).second) {
        return errors::FieldProblem(name, "is given twice", value);
      }
    }
    return parameters;
  }

  // The value of a parameter as a number; 0 if the request does not have the parameter.
  absl::StatusOr<uint64_t> Number(absl::string_view name) const {
    const absl::string_view text = Text(name);
    uint64_t number = 0;
    const bool digits = std::all_of(text.begin(), text.end(), absl::ascii_isdigit);
    if (values_.contains(name) && !(digits && absl::SimpleAtoi(text, &number))) {
      return errors::FieldError(name, "be a number without sign", text);
    }
    return number;
  }

  absl::string_view Text(absl::string_view name) const {
    const auto value = values_.find(name);
    return value == values_.end() ? "" : value->second;
  }

 private:
  std::map<absl::string_view, absl::string_view> values_;
};

HttpResponse HistoryAnswer(const PageSources& sources, const HttpCall& call) {
  const absl::StatusOr<Parameters> parameters = Parameters::Read(call, {"after", "head"});
  if (!parameters.ok()) return BadRequest(parameters.status());
  const absl::StatusOr<uint64_t> after = parameters->Number("after");
  if (!after.ok()) return BadRequest(after.status());
  return Json(sources.history->Json(sources.incarnation, *after, parameters->Text("head")));
}

HttpResponse EventsAnswer(const PageSources& sources, const HttpCall& call) {
  const absl::StatusOr<Parameters> parameters = Parameters::Read(call, {"after"});
  if (!parameters.ok()) return BadRequest(parameters.status());
  const absl::StatusOr<uint64_t> after = parameters->Number("after");
  if (!after.ok()) return BadRequest(after.status());
  return Json(ToJson(sources.events->After(*after), sources.incarnation));
}

HttpResponse TraceError(const absl::Status& status) {
  const int code = absl::IsInvalidArgument(status) ? 400 : absl::IsNotFound(status) ? 404 : 409;
  return {.status = code, .body = absl::StrCat(status.message(), "\n")};
}

HttpResponse TraceStart(const PageSources& sources, const HttpCall& call) {
  const absl::StatusOr<Parameters> parameters = Parameters::Read(call, {"seconds"});
  if (!parameters.ok()) return BadRequest(parameters.status());
  double seconds = 0.0;
  const absl::string_view text = parameters->Text("seconds");
  if (!absl::SimpleAtod(text, &seconds) || !std::isfinite(seconds)) {
    return BadRequest(errors::FieldError("seconds", "be a number", text));
  }
  const absl::StatusOr<uint64_t> recording = sources.trace->Start(absl::Seconds(seconds));
  if (!recording.ok()) return TraceError(recording.status());
  return Json(absl::StrFormat("{\"recording\":%d,\"seconds\":%g}\n", *recording, seconds));
}

HttpResponse TraceAnswer(const PageSources& sources, const HttpCall& call) {
  const absl::StatusOr<Parameters> parameters = Parameters::Read(call, {"recording"});
  if (!parameters.ok()) return BadRequest(parameters.status());
  const absl::StatusOr<uint64_t> recording = parameters->Number("recording");
  if (!recording.ok()) return BadRequest(recording.status());
  absl::StatusOr<std::string> trace = sources.trace->Take(*recording);
  return trace.ok() ? Json(*std::move(trace)) : TraceError(trace.status());
}

HttpResponse HeadAnswer(const PageSources& sources, const HttpCall& call) {
  if (std::optional<std::string> html = sources.page->RenderHead(call.rest)) return Page(*std::move(html));
  return Page(sources.page->RenderNoHead(call.rest), 404);
}

HttpFunction Asset(absl::string_view content_type, absl::string_view body) {
  return [=](const HttpCall&) {
    return HttpResponse{.content_type = std::string(content_type), .body = std::string(body)};
  };
}

StatusPageOptions WithCheckpoints(StatusPageOptions options, CheckpointLists* checkpoints) {
  options.checkpoints = checkpoints;
  return options;
}

}  // namespace

void AddPages(const PageSources& sources, HttpHandlers* handlers) {
  (*handlers)["/"] = [sources](const HttpCall&) { return Page(sources.page->Render(sources.trouble())); };
  (*handlers)["/heads/"] = [sources](const HttpCall& call) { return HeadAnswer(sources, call); };
  (*handlers)["/history.json"] = [sources](const HttpCall& call) { return HistoryAnswer(sources, call); };
  (*handlers)["/events.json"] = [sources](const HttpCall& call) { return EventsAnswer(sources, call); };
  (*handlers)["/trace"] = {[sources](const HttpCall& call) { return TraceStart(sources, call); },
                           HttpHandler::Effect::kChanges};
  (*handlers)["/trace.json"] = {[sources](const HttpCall& call) { return TraceAnswer(sources, call); },
                                HttpHandler::Effect::kChanges};
  (*handlers)["/page/page.js"] = Asset("text/javascript; charset=utf-8", PageScript());
  (*handlers)["/page/page.css"] = Asset("text/css; charset=utf-8", PageStyle());
  (*handlers)["/page/icon.svg"] = Asset("image/svg+xml", PageIcon());
}

HttpPages::HttpPages(const StatusPageOptions& options, const std::string& checkpoint_directory,
                     const engine::Engine* engine, const kernels::Backend* backend, Metrics* metrics,
                     std::function<std::string()> trouble)
    : sampler_(engine, backend, metrics, &history_),
      checkpoints_(checkpoint_directory),
      page_(WithCheckpoints(options, &checkpoints_), engine, backend, metrics, &history_),
      sources_({.page = &page_,
                .history = &history_,
                .events = &metrics->events(),
                .trace = &metrics->trace(),
                .incarnation = engine->incarnation(),
                .trouble = std::move(trouble)}) {
  sampler_.Start();
}

}  // namespace lossd::metrics
