// SPDX-License-Identifier: Apache-2.0
// HttpServer is a small HTTP server for metrics, health and the status page. It answers GET and HEAD of the
// paths that have a handler, and POST of the paths that change something. It reads no files and no request
// bodies, and it switches to no other protocol. HttpCertificates hands the server's certificate to GnuTLS.
//
// Thread-safe. Handlers run on the server's one thread, one at a time, and every client waits for the handler
// that runs: a handler must not wait for the device, a disk or another client. An answer is copied before it
// is sent, so a client that takes its answer slowly delays no other client.
//
// Answers. Route (http_router.h) decides about well-formed requests; a request that is not well-formed or too
// large gets an error of the library's (400, 413, 414, 431, 505) or is hung up on. A connection is closed
// after one answer. A server that is bound to a loopback address answers requests for loopback hosts only.
//
// Limits. The thread has kStackBytes of stack, which has to hold the static thread-local data of all
// libraries of the program (BLAS takes 60 KiB) and the handlers. A request line and its header fields share
// kRequestBytes. A connection on which nothing happens for kIdleSeconds is closed. Connections of HTTP come
// in as gRPC's connections do (server/connections), on a thread of their own, but the oldest connection makes
// room for a new one: beyond kMostConnections in all, beyond kMostPerPeer of its peer (an address; of this
// host, a user), or when it is older than kAge. A client is therefore never refused because others hold
// connections, not even others of the same peer, and these cost one descriptor each and no thread.
#ifndef LOSSD_SERVER_METRICS_HTTP_SERVER_H_
#define LOSSD_SERVER_METRICS_HTTP_SERVER_H_

#include <gnutls/abstract.h>
#include <gnutls/gnutls.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/access/certificates.h"
#include "server/metrics/http_router.h"

struct MHD_Daemon;

namespace lossd::connections {
class ConnectionAcceptor;
}  // namespace lossd::connections

namespace lossd::metrics {

class HttpCertificates;
struct HttpListener;

// How the server protects itself. Both may be left out.
struct HttpSecurity {
  access::ReloadedTls* tls = nullptr;  // HTTPS; outlives the server. Clients' certificates are not asked for
  HttpGuard guard;                     // asked before a handler runs
};

// Hears, on the thread that accepts, that a connection made room: which limit was reached, kHttpConnections
// or kHttpConnectionsPerAddress, and whose connection it was (connections::Peer::name).
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
  const std::unique_ptr<connections::ConnectionAcceptor> acceptor_;
  MHD_Daemon* daemon_ = nullptr;
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

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_HTTP_SERVER_H_
