// SPDX-License-Identifier: Apache-2.0
// HttpServer is a small HTTP server for metrics, health and the status page. It answers GET and HEAD of the
// paths that have a handler, and POST of the paths that change something. It reads no files and no request
// bodies, and it switches to no other protocol. HttpCertificates hands the server's certificate to GnuTLS.
//
// Thread-safe. Handlers run on the server's one thread, one at a time, and every client waits for the handler
// that runs: a handler must not wait for the device, a disk or another client. An answer is copied before it
// is sent, so a client that takes its answer slowly delays no other client.
//
// Answers. Route decides about well-formed requests; a request that is not well-formed or too
// large gets an error of the library's (400, 413, 414, 431, 505) or is hung up on. A connection is closed
// after one answer. A server that is bound to a loopback address answers requests for loopback hosts only.
//
// Limits. The thread has kStackBytes of stack, which has to hold the static thread-local data of all
// libraries of the program (BLAS takes 60 KiB) and the handlers. A request line and its header fields share
// kRequestBytes. A connection on which nothing happens for kIdleSeconds is closed. Connections of HTTP come
// in as gRPC's connections do (server/access), on a thread of their own, but the oldest connection makes
// room for a new one: beyond kMostConnections in all, beyond kMostPerPeer of its peer (an address; of this
// host, a user), or when it is older than kAge. A client is therefore never refused because others hold
// connections, not even others of the same peer, and these cost one descriptor each and no thread.
#ifndef LOSSD_SERVER_METRICS_HTTP_SERVER_H_
#define LOSSD_SERVER_METRICS_HTTP_SERVER_H_

#include <gnutls/abstract.h>
#include <gnutls/gnutls.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"
#include "server/access/certificates.h"
#include "server/access/listening_socket.h"
#include "server/metrics/events.h"
#include "server/metrics/metrics.h"
#include "server/metrics/status_page.h"

namespace lossd::metrics {

// The script, the style sheet and the icon of the pages: the files in page/, which are built into the program
// (page_assets.cc.in).
absl::string_view PageScript();
absl::string_view PageStyle();
absl::string_view PageIcon();

// ListenForHttp opens the listening sockets of the HTTP server.
//
// All functions are stateless and thread-safe.

struct HttpListener {
  std::vector<access::ListeningSocket> sockets;
  std::string address;  // "host:port" with the port that was chosen
  bool loopback = false;
};

// Listens on "host:port" (IPv4 address or bracketed IPv6 address; port 0: any free one).
// INVALID_ARGUMENT if the address has another form, UNAVAILABLE if it cannot be bound.
absl::StatusOr<HttpListener> ListenForHttp(absl::string_view address);

// What the HTTP server answers to a request, apart from any network: GET and HEAD of the paths that have a
// handler, POST of those whose handler changes something, and an error for everything else.
//
// All functions are stateless and thread-safe.

struct HttpResponse {
  int status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
  std::string allow;  // with 405: the methods that are answered
};

// Names and values of a query, "?name=value&...", in the order in which they were sent. %-escapes are not
// decoded.
using HttpParameters = std::vector<std::pair<absl::string_view, absl::string_view>>;

// What a handler gets of a request. The views are valid during the call.
struct HttpCall {
  absl::string_view rest;  // "lm" of "/heads/lm" for the handler of "/heads/"; else empty
  HttpParameters parameters;
};
using HttpFunction = std::function<HttpResponse(const HttpCall&)>;

// What answers for a path. One that changes something is asked with POST, all others with GET or HEAD:
// browsers send GET for whatever page names an address, and caches and crawlers repeat it.
struct HttpHandler {
  enum class Effect : uint8_t { kNone, kChanges };

  HttpHandler() = default;
  template <typename F, typename = std::enable_if_t<std::is_invocable_r_v<HttpResponse, F, const HttpCall&>>>
  HttpHandler(F answers, Effect has_effect = Effect::kNone)  // NOLINT(google-explicit-constructor)
      : function(std::move(answers)), effect(has_effect) {}

  HttpFunction function;
  Effect effect = Effect::kNone;
};

// By exact path, e.g. "/metrics". A longer path that ends with "/", e.g. "/heads/", stands for all paths that
// have one more name behind it: neither nothing nor another "/".
using HttpHandlers = std::map<std::string, HttpHandler, std::less<>>;

// Refuses a request because of who sent it: returns the answer, or nothing if the request may be answered.
struct HttpRequest;
using HttpGuard =
    std::function<std::optional<HttpResponse>(const HttpRequest& request, absl::string_view path)>;

// The parts of a request that decide about its answer. The views outlive the call they are passed to.
struct HttpRequest {
  absl::string_view method;
  absl::string_view target;              // as sent, without the query: "/metrics" or "http://host/metrics"
  absl::string_view version;             // "HTTP/1.1"
  HttpParameters parameters;             // of the query
  std::vector<absl::string_view> hosts;  // the values of all Host fields
  std::vector<absl::string_view> authorizations;  // and of all Authorization fields
  std::vector<absl::string_view> origins;         // of all Origin fields
  std::vector<absl::string_view> fetch_sites;     // of all Sec-Fetch-Site fields
  std::string peer;                               // the client's address, without the port
  std::string peer_name;                          // and whose connection it is (access::Peer::name)
};

// Whose requests are answered.
enum class HttpAudience : uint8_t {
  // Requests for a loopback host, or without a host. Web pages too reach a server that listens on the
  // loopback only, if a name of theirs resolves to 127.0.0.1 (DNS rebinding). Such requests name that host,
  // because browsers always name a host.
  kLoopbackHosts,
  kAnyHost,
};

// Calls the handler of the path. Errors, the first that applies:
//   400  several Host fields, or none in HTTP/1.1; HTTP/1.0 does not need one, and some health checkers
//        send none.
//   403  the host is not of the audience. (Not 421, which invites the client to try again elsewhere.)
//   405  the method is not POST and the handler changes something, or it is neither GET nor HEAD, whatever
//        the path, and no such handler has it.
//   404  the path has no handler. Paths are compared as sent: %-escapes are not decoded.
//   403  the handler changes something and the request is of another web page (IsOfAnotherPage).
//   then what the guard answers, if there is a guard.
// The host of a target in absolute form takes the place of the Host field, as RFC 9112 has it.
HttpResponse Route(const HttpRequest& request, const HttpHandlers& handlers, HttpAudience audience,
                   const HttpGuard& guard = nullptr);

// Whether a browser sent the request for a page of another origin than this server. Browsers say so in
// Sec-Fetch-Site, which scripts cannot set; older browsers, which do not know that field, name the page's
// origin with POST. A program that is no browser sends neither field, and a page cannot send requests through
// it.
bool IsOfAnotherPage(const HttpRequest& request);

// True for "localhost", addresses in 127.0.0.0/8 and "[::1]", each with or without a port.
bool NamesLoopback(absl::string_view host);

}  // namespace lossd::metrics

struct MHD_Daemon;

namespace lossd::access {
class ConnectionAcceptor;
}  // namespace lossd::access

namespace lossd::metrics {

class HttpCertificates;
struct HttpListener;

// How the server protects itself. Both may be left out.
struct HttpSecurity {
  access::ReloadedTls* tls = nullptr;  // HTTPS; outlives the server. Clients' certificates are not asked for
  HttpGuard guard;                     // asked before a handler runs
};

// Hears, on the thread that accepts, that a connection made room: which limit was reached, kHttpConnections
// or kHttpConnectionsPerAddress, and whose connection it was (access::Peer::name).
using HttpOnLimit = std::function<void(absl::string_view limit, absl::string_view peer)>;
inline constexpr absl::string_view kHttpConnections = "http_connections";
inline constexpr absl::string_view kHttpConnectionsPerAddress = "http_connections_per_address";

class HttpServer {
 public:
  static constexpr size_t kStackBytes = size_t{1} << 20;
  static constexpr size_t kRequestBytes = size_t{16} << 10;
  static constexpr unsigned kIdleSeconds = 10;
  static constexpr int64_t kMostConnections = 256;
  static constexpr int64_t kMostPerPeer = 128;
  static constexpr absl::Duration kAge = absl::Seconds(30);

  // Listens on "host:port" (IPv4 address or bracketed IPv6 address; port 0: any free one).
  // INVALID_ARGUMENT if the address has another form, UNAVAILABLE if it cannot be bound.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(absl::string_view address, HttpHandlers handlers,
                                                           HttpSecurity security = {},
                                                           HttpOnLimit on_limit = nullptr);
  // Waits for the handler that is running and closes all connections.
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  // "host:port" with the port that was chosen.
  std::string address() const { return address_; }
  // How long the thread that accepts connections has shown no sign of life, or a handler has been running,
  // whichever is longer. Takes no lock. Whether the library's thread would answer the next request it does
  // not know: a request is the only sign of that.
  absl::Duration Silence() const;

 private:
  struct Callbacks;  // of the library

  // More than the acceptor lets in, whose limits hold.
  static constexpr unsigned kLibraryConnections = 2 * kMostConnections;

  HttpServer(HttpListener listener, HttpHandlers handlers, HttpGuard guard,
             std::unique_ptr<HttpCertificates> certificates, HttpOnLimit on_limit);

  // False if the thread cannot be started.
  bool Run();
  // On the acceptor's thread. The library closes the connection, also if it does not take it.
  void Take(int connection);

  const std::string address_;
  const HttpAudience audience_;
  const HttpHandlers handlers_;
  const HttpGuard guard_;
  const std::unique_ptr<HttpCertificates> certificates_;  // null: plain HTTP
  const std::unique_ptr<access::ConnectionAcceptor> acceptor_;
  MHD_Daemon* daemon_ = nullptr;
  clocks::Heartbeat handler_begins_;
  std::atomic<bool> handler_runs_{false};
};

// The certificate of the HTTP server, as GnuTLS takes it, parsed again when the files have changed.
// Thread-compatible: created on one thread and then used by the server's one thread.
class HttpCertificates {
 public:
  // `material` outlives it. INVALID_ARGUMENT if GnuTLS does not take certificate or key.
  static absl::StatusOr<std::unique_ptr<HttpCertificates>> Create(access::ReloadedTls* material);
  ~HttpCertificates();
  HttpCertificates(const HttpCertificates&) = delete;
  HttpCertificates& operator=(const HttpCertificates&) = delete;

  // Has Retrieve take certificates from here when this thread calls it. (The library's callback has no
  // argument by which it could know.)
  void ServeThisThread();

  // A gnutls_certificate_retrieve_function2. What it hands out stays valid for at least kKept.
  static int Retrieve(gnutls_session_t session, const gnutls_datum_t* authorities, int authority_count,
                      const gnutls_pk_algorithm_t* algorithms, int algorithm_count,
                      gnutls_pcert_st** certificates, unsigned* certificate_count, gnutls_privkey_t* key);

 private:
  // A handshake may still use a certificate that has been replaced; connections do not live that long.
  static constexpr absl::Duration kKept = absl::Minutes(2);

  struct Parsed;

  explicit HttpCertificates(access::ReloadedTls* material);
  absl::Status Parse(const std::shared_ptr<const access::TlsMaterial>& material);
  const Parsed& Current();

  access::ReloadedTls* const material_;
  std::shared_ptr<const access::TlsMaterial> seen_;  // parsed, or found not to be parsable
  std::deque<std::unique_ptr<Parsed>> parsed_;       // the newest last; never empty after Create
};

// HttpPages has the handlers of the paths for people and their pages: the pages, their script and style, and
// the samples and events as JSON. (Metrics and health have handlers of their own.)
//
//   /              the status page
//   /heads/NAME    the page of a head
//   /history.json  samples; ?after=NUMBER: only later ones; ?head=NAME: of the heads only this one
//   /events.json   events; ?after=ID: only later ones
//   /trace         POST: begins a trace of ?seconds=SECONDS, and says its number
//   /trace.json    POST: hands out the trace ?recording=NUMBER, once it is over, and only once
//   /page/...      script, style and icon of the pages
//
// A parameter that is malformed or unknown is answered with 400. A trace that does not exist is answered with
// 404; a trace that is not over, or that another trace prevents, with 409.

// Paths for operators only, because a request for such a path makes the server do work.
inline constexpr absl::string_view kOperatorPaths[] = {"/trace", "/trace.json"};

// All outlive the handlers.
struct PageSources {
  const StatusPage* page = nullptr;
  const History* history = nullptr;
  const EventLog* events = nullptr;
  TraceRecorder* trace = nullptr;
  uint64_t incarnation = 0;
  std::function<std::string()> trouble;  // as StatusPage::Render takes it
};
void AddPages(const PageSources& sources, HttpHandlers* handlers);

// The pages of a server, and the samples that they show: from its creation on, samples are taken.
//
// Thread-safe.
class HttpPages {
 public:
  // All outlive this. `trouble` is asked with each request.
  // The pages list the checkpoints of `checkpoint_directory`; empty: they list none.
  HttpPages(const StatusPageOptions& options, const std::string& checkpoint_directory,
            const engine::Engine* engine, const kernels::Backend* backend, Metrics* metrics,
            std::function<std::string()> trouble);

  // This outlives the handlers.
  void AddTo(HttpHandlers* handlers) const { AddPages(sources_, handlers); }

 private:
  History history_;
  Sampler sampler_;
  CheckpointLists checkpoints_;
  const StatusPage page_;
  const PageSources sources_;
};

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_HTTP_SERVER_H_
