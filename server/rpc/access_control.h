// SPDX-License-Identifier: Apache-2.0
// Access to the methods of the services. AccessControl finds out who makes a call and whether the caller may
// make it, and writes the call's audit line. Every method of the services calls AccessControl::Admit first
// (app_security_test calls each method without an identity and with too low a role). MethodAccessTable says
// which role each method needs. PeerKey returns the name of the peer for which limits count a call.
//
// All functions and classes are thread-safe.
#ifndef LOSSD_SERVER_RPC_ACCESS_CONTROL_H_
#define LOSSD_SERVER_RPC_ACCESS_CONTROL_H_

#include <grpcpp/server_context.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/access/audit_log.h"
#include "server/access/authority.h"
#include "server/access/certificates.h"
#include "server/access/roles.h"
#include "server/log/log.h"

namespace lossd::rpc {

// The role that a caller needs for one method of lossd.v1. A method that is not in the table is refused to
// every client; access_control_test walks over the protocol's services.
struct MethodAccess {
  absl::string_view service;  // "lossd.v1.HeadService"
  absl::string_view method;   // "CreateHead"; no two services have a method of one name
  access::Role role = access::Role::kAdmin;
  bool audited = true;  // each call of the method writes an audit line
  // Calls of the method take almost no time and change nothing for good, so a client could fill a disk with
  // their audit lines. So the lines of calls that ended well have a budget too, not only those of failed
  // calls.
  bool leaves_nothing = false;
};

absl::Span<const MethodAccess> MethodAccessTable();

// The entry of a method in MethodAccessTable; null if there is none.
const MethodAccess* FindMethodAccess(absl::string_view method);

// A call that was admitted: who makes it, and what its audit line needs when it ends.
struct AdmittedCall {
  const MethodAccess* method = nullptr;       // null: not admitted
  std::string identity;                       // who calls; empty: the server does not ask
  absl::Time until = absl::InfiniteFuture();  // when the caller's certificate expires; the call ends then
  access::Role role = access::Role::kAdmin;   // the caller's; admin if the server does not ask
  std::string address;                        // "10.0.0.5:40112"; empty unless the method is audited
  log::LineHolder holder;                     // AuditedCall::holder; empty unless the method is audited
};

// Admits and refuses calls, by what the authority knows of callers and by MethodAccessTable.
class AccessControl {
 public:
  // Returns the user whose connection comes from an address of the loopback ("127.0.0.1:41234"), as
  // access::ConnectionAcceptor::NameAt: "uid 1000". Empty if the user is not known. Thread-safe.
  using NameAt = std::function<std::string(absl::string_view address)>;

  // `authority` and `audit` outlive this object.
  AccessControl(const access::Authority* authority, access::AuditLog* audit, NameAt name_at = nullptr)
      : authority_(authority), audit_(audit), name_at_(std::move(name_at)) {}

  // The identity of the caller; empty if the server asks no caller. UNAUTHENTICATED, with an audit line, if
  // the caller is not known. For calls whose request has not come yet, so that the server does not receive
  // the request of an unknown caller.
  absl::StatusOr<std::string> Identify(const grpc::CallbackServerContext& context,
                                       absl::string_view method) const;

  // Admits the call, or refuses it: UNAUTHENTICATED if the caller is not known; PERMISSION_DENIED, naming
  // method, role and identity, if the caller's role is too low. A refusal writes an audit line. `head` is the
  // head that the call is about; empty: not known.
  absl::StatusOr<AdmittedCall> Admit(const grpc::CallbackServerContext& context, absl::string_view method,
                                     absl::string_view head = "") const;

  // Refuses a call that was admitted, because of what its request asks for. Writes an audit line with
  // `status`, and returns `status`.
  absl::Status Refuse(const grpc::CallbackServerContext& context, const AdmittedCall& call,
                      absl::string_view head, absl::Status status) const;

  // The name of the budget of log lines that pays for a line about a call of `peer` (PeerKey). Each identity
  // has a budget, and so has each address. A program on the server's own machine may open any number of
  // connections, so budgets there are not per connection: each user has one ("uid 1000"), all users that the
  // kernel does not name share one ("loopback"), and so do all clients that come over Unix sockets ("unix"),
  // whose users gRPC does not tell.
  std::string HolderOf(absl::string_view peer) const;

  // Writes the log line of a call that has failed. Each holder (HolderOf) has a budget of such lines
  // (AuditLog::Failed). `peer` is PeerKey's.
  void Failed(absl::string_view peer, absl::string_view method, absl::string_view code,
              absl::string_view error) const;

  // Writes the audit line of a call that has ended, if its method has one. Does nothing for a call that was
  // not admitted. `removed`: what the call removed in addition to what it names.
  void Ended(const AdmittedCall& call, absl::string_view head, absl::string_view outcome,
             const std::vector<std::string>& removed = {}) const;

 private:
  access::Presented PresentedWith(const grpc::CallbackServerContext& context) const;
  // The content of the audit line of a call that is refused.
  access::AuditedCall Audited(const grpc::CallbackServerContext& context, const std::string& identity,
                              absl::string_view method, absl::string_view head) const;

  mutable access::CertificateEnds ends_;
  const access::Authority* const authority_;
  access::AuditLog* const audit_;
  const NameAt name_at_;
};

// Whether this status refuses a call because of who made it. Such calls write audit lines, whose number is
// bounded, and no other log lines.
bool IsRefusal(const grpc::Status& status);

// The address of the peer, without gRPC's prefix and escapes: "10.0.0.5:40112", "[::1]:40112".
std::string PeerAddress(const grpc::CallbackServerContext& context);

// The peer that limits count a call for: the identity if the server asks for one ("dns:trainer-1",
// "token:pipeline-1"), else what PeerOf says of the connection.
std::string PeerKey(const grpc::CallbackServerContext& context, absl::string_view identity);

// The name that PeerKey returns for a client without an identity. `uri` is the connection's name in gRPC,
// e.g. "ipv4:10.0.0.7:41234" or "ipv6:%5Bfe80::1%5D:41234"; the peer is its address without the port,
// "10.0.0.7". The address of the server's own machine does not tell one process from another, so there each
// connection is a peer of its own ("127.0.0.1:41234"). A connection over a Unix socket has no address at all;
// `connection` tells it from the others that are open. "" for callers in this process, which have no limits
// of their own. Thread-safe.
std::string PeerOf(absl::string_view uri, uint64_t connection);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_ACCESS_CONTROL_H_
