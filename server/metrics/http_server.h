// SPDX-License-Identifier: Apache-2.0
// HttpServer is a small HTTP server for metrics, health and the status page. It answers GET and HEAD of the
// paths that have a handler, and POST of the paths that change something. It reads no files and no request
// bodies, and it switches to no other protocol. HttpCertificates hands the server's certificate to GnuTLS.
//
// Thread-safe. Handlers run on the server's one thread, one at a time, and every client waits for the handler
// that runs: a handler must not wait for the device, a disk or another client. An answer is copied before it
// is sent, so a client that reads its answer slowly delays no other client.
//
// Answers. Route answers well-formed requests. If a request is malformed or too large, the library
// (libmicrohttpd) answers with an error (400, 413, 414, 431, 505) or closes the connection. A connection is
// closed after one answer. A server that is bound to a loopback address answers requests for loopback hosts
// only.
//
// Limits. The thread has kStackBytes of stack. The handlers and the static thread-local data of all libraries
// of the program (BLAS takes 60 KiB) must fit in it. A request line and its header fields share
// kRequestBytes. A connection on which nothing happens for kIdleSeconds is closed.
//
// Connections. They are accepted in the same way as gRPC's connections (server/access), on a thread of their
// own. But a new connection is never refused. If there are more than kMostConnections in all, or more than
// kMostPerPeer of one peer, the oldest connection is closed to make room. (A peer is an address, or a user of
// this host.) When a new connection comes, connections older than kAge are also closed. So clients that hold
// connections cannot lock out other clients. A connection costs one descriptor and no thread.
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

// The script, the style sheet and the icon of the pages. They are the files in page/, which are built into
// the program (page_assets.cc.in).
absl::string_view PageScript();
absl::string_view PageStyle();
absl::string_view PageIcon();

// The listening sockets of the HTTP server, opened by ListenForHttp.
//
// All functions are stateless and thread-safe.

struct HttpListener {
  std::vector<access::ListeningSocket> sockets;
  std::string address;  // "host:port" with the actual port
  bool loopback = false;
};

// Listens on "host:port" (IPv4 address or bracketed IPv6 address; port 0: any free port). INVALID_ARGUMENT if
// the address has another form, UNAVAILABLE if it cannot be bound.
absl::StatusOr<HttpListener> ListenForHttp(absl::string_view address);

// How the HTTP server answers a request, without any network code. Handlers without effects answer GET and
// HEAD, and handlers that change something answer POST. Every other request gets an error.
//
// All functions are stateless and thread-safe.

struct HttpResponse {
  int status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
  std::string allow;  // with status 405: the allowed methods
};

// Names and values of a query, "?name=value&...", in the order in which they were sent. %-escapes are not
// decoded.
using HttpParameters = std::vector<std::pair<absl::string_view, absl::string_view>>;

// The parts of a request that a handler gets. The views are valid during the call.
struct HttpCall {
  // The path after a handler's path that ends with "/": "lm" if "/heads/" handles "/heads/lm". Otherwise
  // empty.
  absl::string_view rest;
  HttpParameters parameters;
};
using HttpFunction = std::function<HttpResponse(const HttpCall&)>;

// A function that answers for a path. It answers POST if it changes something, otherwise GET and HEAD. GET
// must change nothing: any web page can make a browser send it, and caches and crawlers repeat it.
struct HttpHandler {
  enum class Effect : uint8_t { kNone, kChanges };

  HttpHandler() = default;
  template <typename F, typename = std::enable_if_t<std::is_invocable_r_v<HttpResponse, F, const HttpCall&>>>
  HttpHandler(F answers, Effect has_effect = Effect::kNone)  // NOLINT(google-explicit-constructor)
      : function(std::move(answers)), effect(has_effect) {}

  HttpFunction function;
  Effect effect = Effect::kNone;
};

// Handlers by path. A path such as "/metrics" matches exactly. A path that ends with "/", such as "/heads/",
// matches paths with one more name behind it, which is not empty and has no "/". "/" itself matches exactly.
using HttpHandlers = std::map<std::string, HttpHandler, std::less<>>;

// Checks whether the sender may make a request. Returns the answer that refuses the request, or nullopt if a
// handler may answer.
struct HttpRequest;
using HttpGuard =
    std::function<std::optional<HttpResponse>(const HttpRequest& request, absl::string_view path)>;

// The parts of a request that decide about its answer. The views outlive the call to which the request is
// passed.
struct HttpRequest {
  absl::string_view method;
  absl::string_view target;              // as sent, without the query: "/metrics" or "http://host/metrics"
  absl::string_view version;             // "HTTP/1.1"
  HttpParameters parameters;             // the parameters of the query
  std::vector<absl::string_view> hosts;  // the values of all Host fields
  std::vector<absl::string_view> authorizations;  // the values of all Authorization fields
  std::vector<absl::string_view> origins;         // the values of all Origin fields
  std::vector<absl::string_view> fetch_sites;     // the values of all Sec-Fetch-Site fields
  std::string peer;                               // the client's address, without the port
  std::string peer_name;                          // the owner of the connection (access::Peer::name)
};

// The requests that are answered, by the host that they name.
enum class HttpAudience : uint8_t {
  // Requests for a loopback host, or without a host. A server that listens on the loopback can still be
  // reached by foreign web pages, if their host name resolves to 127.0.0.1 (DNS rebinding). kLoopbackHosts
  // refuses such requests, because browsers always send the host name.
  kLoopbackHosts,
  kAnyHost,
};

// Calls the handler of the path and returns its answer. The first of these errors that applies is the answer
// instead:
//   400  several Host fields, or none in HTTP/1.1; HTTP/1.0 does not need one, and some health checkers
//        send none.
//   403  the host does not belong to the audience. (Not 421, which invites the client to try again
//        elsewhere.)
//   405  the handler changes something and the method is not POST; or the handler changes nothing (or there
//   is no handler), and the method is neither GET nor HEAD.
//   404  the path has no handler. Paths are compared as sent: %-escapes are not decoded.
//   403  the handler changes something and the request is of another web page (IsOfAnotherPage).
//   then the answer of the guard, if there is a guard and it refuses.
//
// If the target is in absolute form, its host replaces the Host field (RFC 9112).
HttpResponse Route(const HttpRequest& request, const HttpHandlers& handlers, HttpAudience audience,
                   const HttpGuard& guard = nullptr);

// Whether a browser sent the request for a page of another origin than this server. Browsers report this in
// the field Sec-Fetch-Site, which scripts cannot set. Older browsers do not know that field, but send the
// page's Origin with POST. Other programs send neither field; pages cannot send requests through them.
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

// How the server protects itself. Both members may be left out.
struct HttpSecurity {
  // For HTTPS. It outlives the server. The server asks for no client certificates. Null: plain HTTP.
  access::ReloadedTls* tls = nullptr;
  HttpGuard guard;  // called before a handler runs
};

// Called on the accepting thread when a connection was closed to make room. `limit`: the limit that was
// reached, kHttpConnections or kHttpConnectionsPerAddress. `peer`: the owner of the closed connection
// (access::Peer::name).
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

  // Starts a server that listens on "host:port" (IPv4 address or bracketed IPv6 address; port 0: any free
  // port). INVALID_ARGUMENT if the address has another form, UNAVAILABLE if it cannot be bound.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(absl::string_view address, HttpHandlers handlers,
                                                           HttpSecurity security = {},
                                                           HttpOnLimit on_limit = nullptr);
  // Waits until the running handler returns, and closes all connections.
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  // "host:port" with the actual port.
  std::string address() const { return address_; }
  // The longer of two times: since the last sign of life of the accepting thread, and since the running
  // handler began. Takes no lock. Only a request can show whether the library's thread would answer the next
  // request.
  absl::Duration Silence() const;

 private:
  struct Callbacks;  // callbacks for the library

  // The library's own limit. It is larger than the acceptor's limits, so the acceptor's limits apply.
  static constexpr unsigned kLibraryConnections = 2 * kMostConnections;

  HttpServer(HttpListener listener, HttpHandlers handlers, HttpGuard guard,
             std::unique_ptr<HttpCertificates> certificates, HttpOnLimit on_limit);

  // False if the thread cannot be started.
  bool Run();
  // Hands a connection to the library. Called on the acceptor's thread. The library closes the connection in
  // the end, even if it refuses the connection.
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

// HttpCertificates has the certificate of the HTTP server in GnuTLS's form, and parses it again when the
// files have changed. Thread-compatible: one thread creates it, and then the server's one thread uses it.
class HttpCertificates {
 public:
  // `material` outlives the object. INVALID_ARGUMENT if GnuTLS does not accept certificate or key.
  static absl::StatusOr<std::unique_ptr<HttpCertificates>> Create(access::ReloadedTls* material);
  ~HttpCertificates();
  HttpCertificates(const HttpCertificates&) = delete;
  HttpCertificates& operator=(const HttpCertificates&) = delete;

  // Makes Retrieve use this object when the calling thread calls it. (GnuTLS's callback has no argument for
  // the object.)
  void ServeThisThread();

  // A gnutls_certificate_retrieve_function2. The certificate and the key that it hands out stay valid for at
  // least kKept.
  static int Retrieve(gnutls_session_t session, const gnutls_datum_t* authorities, int authority_count,
                      const gnutls_pk_algorithm_t* algorithms, int algorithm_count,
                      gnutls_pcert_st** certificates, unsigned* certificate_count, gnutls_privkey_t* key);

 private:
  // A handshake may still use a certificate that has been replaced. No connection lives as long as this.
  static constexpr absl::Duration kKept = absl::Minutes(2);

  struct Parsed;

  explicit HttpCertificates(access::ReloadedTls* material);
  absl::Status Parse(const std::shared_ptr<const access::TlsMaterial>& material);
  const Parsed& Current();

  access::ReloadedTls* const material_;
  std::shared_ptr<const access::TlsMaterial> seen_;  // the last material that was parsed, or failed to parse
  std::deque<std::unique_ptr<Parsed>> parsed_;       // the newest last; never empty after Create
};

// HttpPages has the handlers for browsers: the pages, their script and style, and the samples, events and
// traces as JSON. (Metrics and health have handlers of their own.)
//
//   /              the status page
//   /heads/NAME    the page of a head
//   /history.json  samples; ?after=NUMBER: only later samples; ?head=NAME: only this head's series
//   /events.json   events; ?after=ID: only later events
//   /trace         POST: begins a trace of ?seconds=SECONDS, and answers with its number
//   /trace.json    POST: hands out the trace ?recording=NUMBER, once it is over, and only once
//   /page/...      script, style and icon of the pages
//
// A parameter that is malformed or unknown is answered with 400. A trace that does not exist is answered with
// 404. A trace that is not over, or that cannot begin because of another trace, is answered with 409.

// Paths for operators only, because each request makes the server do work.
inline constexpr absl::string_view kOperatorPaths[] = {"/trace", "/trace.json"};

// The objects that the pages show. All outlive the handlers.
struct PageSources {
  const StatusPage* page = nullptr;
  const History* history = nullptr;
  const EventLog* events = nullptr;
  TraceRecorder* trace = nullptr;
  uint64_t incarnation = 0;
  std::function<std::string()> trouble;  // see StatusPage::Render
};
void AddPages(const PageSources& sources, HttpHandlers* handlers);

// The pages of a server, with the samples that they show. It takes samples from its creation on.
//
// Thread-safe.
class HttpPages {
 public:
  // The arguments outlive the object. `trouble` is called for each request. The pages list the checkpoints of
  // `checkpoint_directory`; empty: they list none.
  HttpPages(const StatusPageOptions& options, const std::string& checkpoint_directory,
            const engine::Engine* engine, const kernels::Backend* backend, Metrics* metrics,
            std::function<std::string()> trouble);

  // Adds the handlers. The object outlives them.
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
