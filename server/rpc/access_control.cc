// SPDX-License-Identifier: Apache-2.0
// Who may call which method (access_control.h): the table of methods, the identity of a caller, and names of
// peers.
#include "server/rpc/access_control.h"

#include <grpc/grpc_security_constants.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"

namespace lossd::rpc {
namespace {

using access::Role;

constexpr absl::string_view kHeads = "lossd.v1.HeadService";
constexpr absl::string_view kLosses = "lossd.v1.LossService";
constexpr absl::string_view kServer = "lossd.v1.ServerService";

// Service, method, role, audited, leaves_nothing. Audited are rare calls that create, replace, save or
// discard results of training. Calls of every step (ComputeLoss, AddGradient, ApplyStep, reads) are not
// audited; metrics count them.
constexpr MethodAccess kTable[] = {
    {kServer, "GetServer", Role::kReader, false},       //
    {kServer, "ListStreams", Role::kReader, false},     //
    {kHeads, "DescribeHead", Role::kReader, false},     //
    {kHeads, "ListHeads", Role::kReader, false},        //
    {kHeads, "ListCheckpoints", Role::kReader, false},  //

    {kLosses, "ComputeLoss", Role::kTrainer, false},        //
    {kLosses, "ReleaseMicrobatch", Role::kTrainer, false},  //
    {kHeads, "AddGradient", Role::kTrainer, false},         //
    {kHeads, "GradNorm", Role::kTrainer, false},            //
    {kHeads, "ApplyStep", Role::kTrainer, false},           //
    {kHeads, "ReadTensor", Role::kTrainer, false},          //
    {kHeads, "ZeroGradients", Role::kTrainer, true, true},  //
    {kHeads, "SaveCheckpoint", Role::kTrainer, true},       //
    {kHeads, "DeleteCheckpoint", Role::kTrainer, true},     //

    {kHeads, "CreateHead", Role::kAdmin, true},      //
    {kHeads, "PlanHead", Role::kAdmin, true, true},  //
    {kHeads, "DeleteHead", Role::kAdmin, true},      //
    {kHeads, "ResetHead", Role::kAdmin, true},       //
    {kHeads, "SetShares", Role::kAdmin, true},       //
    {kHeads, "WriteTensor", Role::kAdmin, true},     //
    {kHeads, "LoadCheckpoint", Role::kAdmin, true},  //
};

}  // namespace

absl::Span<const MethodAccess> MethodAccessTable() { return kTable; }

const MethodAccess* FindMethodAccess(absl::string_view method) {
  for (const MethodAccess& line : kTable) {
    if (line.method == method) return &line;
  }
  return nullptr;
}

namespace {

// How the names begin that PeerOf gives to peers on this machine.
constexpr absl::string_view kUnixPeer = "unix#";
bool IsLoopbackPeer(absl::string_view peer) {
  return absl::StartsWith(peer, "127.") || absl::StartsWith(peer, "[::1]") ||
         absl::StartsWith(peer, "[::ffff:127.");
}

constexpr size_t kMaxNames = 100;  // the most names of one certificate that are used

void AddNames(const grpc::AuthContext& context, const char* property, absl::string_view kind,
              std::vector<std::string>* names) {
  for (const grpc::string_ref& value : context.FindPropertyValues(property)) {
    if (names->size() == kMaxNames) return;
    names->push_back(absl::StrCat(kind, absl::string_view(value.data(), value.size())));
  }
}

}  // namespace

access::Presented AccessControl::PresentedWith(const grpc::CallbackServerContext& context) const {
  access::Presented presented;
  const std::shared_ptr<const grpc::AuthContext> auth = context.auth_context();
  // gRPC gives the certificate of a peer only if it has verified the certificate.
  const std::vector<grpc::string_ref> pem = auth == nullptr
                                                ? std::vector<grpc::string_ref>()
                                                : auth->FindPropertyValues(GRPC_X509_PEM_CERT_PROPERTY_NAME);
  if (!pem.empty()) {
    presented.certificate = true;
    presented.end = ends_.Find({pem.front().data(), pem.front().size()});
    // The certificates between the client's own and the authority.
    for (const grpc::string_ref& chain : auth->FindPropertyValues(GRPC_X509_PEM_CERT_CHAIN_PROPERTY_NAME)) {
      if (chain.size() > 0) presented.end = std::min(presented.end, ends_.Find({chain.data(), chain.size()}));
    }
    AddNames(*auth, GRPC_PEER_DNS_PROPERTY_NAME, "dns:", &presented.names);
    AddNames(*auth, GRPC_PEER_URI_PROPERTY_NAME, "uri:", &presented.names);
    AddNames(*auth, GRPC_PEER_EMAIL_PROPERTY_NAME, "email:", &presented.names);
    AddNames(*auth, GRPC_PEER_IP_PROPERTY_NAME, "ip:", &presented.names);
  }
  const auto authorization = context.client_metadata().find("authorization");
  if (authorization != context.client_metadata().end()) {
    presented.authorization.emplace(authorization->second.data(), authorization->second.size());
  }
  return presented;
}

absl::StatusOr<std::string> AccessControl::Identify(const grpc::CallbackServerContext& context,
                                                    absl::string_view method) const {
  if (!authority_->asks()) return std::string();
  absl::StatusOr<access::Identity> identity = authority_->Identify(PresentedWith(context));
  if (identity.ok()) return std::move(identity->name);
  audit_->Refused(Audited(context, "", method, ""), identity.status());
  return identity.status();
}

access::AuditedCall AccessControl::Audited(const grpc::CallbackServerContext& context,
                                           const std::string& identity, absl::string_view method,
                                           absl::string_view head) const {
  return {.identity = identity,
          .holder = {.name = HolderOf(PeerKey(context, identity)), .is_known = !identity.empty()},
          .address = PeerAddress(context),
          .method = method,
          .head = std::string(head)};
}

absl::StatusOr<AdmittedCall> AccessControl::Admit(const grpc::CallbackServerContext& context,
                                                  absl::string_view method, absl::string_view head) const {
  const MethodAccess* const line = FindMethodAccess(method);
  AdmittedCall call{.method = line};
  absl::Status status;
  if (authority_->asks()) {
    absl::StatusOr<access::Identity> identity = authority_->Identify(PresentedWith(context));
    status = identity.status();
    if (identity.ok()) {
      call.identity = identity->name;
      call.role = identity->role.value_or(access::Role::kReader);
      call.until = identity->until;
      status = line != nullptr ? access::CheckRole(*identity, line->role, method)
                               : absl::PermissionDeniedError(absl::StrCat("no role may call ", method));
    }
  }
  if (!status.ok()) {
    audit_->Refused(Audited(context, call.identity, method, head), status);
    return status;
  }
  if (line != nullptr && line->audited) {
    call.address = PeerAddress(context);
    call.holder = {.name = HolderOf(PeerKey(context, call.identity)), .is_known = authority_->asks()};
  }
  return call;
}

std::string AccessControl::HolderOf(absl::string_view peer) const {
  if (absl::StartsWith(peer, kUnixPeer)) return "unix";
  if (!IsLoopbackPeer(peer)) return std::string(peer);
  const std::string name = name_at_ == nullptr ? "" : name_at_(peer);
  return name.empty() ? "loopback" : name;
}

void AccessControl::Failed(absl::string_view peer, absl::string_view method, absl::string_view code,
                           absl::string_view error) const {
  // If the server asks for identities, the caller of a call that was not refused is known.
  audit_->Failed({.name = HolderOf(peer), .is_known = authority_->asks()}, peer, method, code, error);
}

absl::Status AccessControl::Refuse(const grpc::CallbackServerContext& context, const AdmittedCall& call,
                                   absl::string_view head, absl::Status status) const {
  audit_->Refused(Audited(context, call.identity, call.method->method, head), status);
  return status;
}

void AccessControl::Ended(const AdmittedCall& call, absl::string_view head, absl::string_view outcome,
                          const std::vector<std::string>& removed) const {
  if (call.method == nullptr || !call.method->audited) return;
  audit_->Ended({.identity = call.identity,
                 .holder = call.holder,
                 .address = call.address,
                 .method = call.method->method,
                 .head = std::string(head),
                 .removed = removed,
                 .leaves_nothing = call.method->leaves_nothing},
                outcome);
}

bool IsRefusal(const grpc::Status& status) {
  return status.error_code() == grpc::StatusCode::UNAUTHENTICATED ||
         status.error_code() == grpc::StatusCode::PERMISSION_DENIED;
}

std::string PeerAddress(const grpc::CallbackServerContext& context) {
  const std::string peer = context.peer();  // "ipv4:10.0.0.5:40112", "ipv6:%5B::1%5D:40112", "unix:/path"
  absl::string_view address = peer;
  if (!absl::ConsumePrefix(&address, "ipv4:")) absl::ConsumePrefix(&address, "ipv6:");
  return absl::StrReplaceAll(address, {{"%5B", "["}, {"%5D", "]"}, {"%25", "%"}});
}

namespace {

// A number that no other open connection of the server has, because gRPC itself has no number for a
// connection. It is the address in memory of the properties that gRPC keeps for each connection, with and
// without TLS. 0 if there are no properties.
uint64_t ConnectionNumber(const grpc::CallbackServerContext& context) {
  const std::shared_ptr<const grpc::AuthContext> connection = context.auth_context();
  if (connection == nullptr) return 0;
  const std::vector<grpc::string_ref> values =
      connection->FindPropertyValues(GRPC_TRANSPORT_SECURITY_TYPE_PROPERTY_NAME);
  return values.empty() ? 0 : reinterpret_cast<uintptr_t>(values.front().data());
}

}  // namespace

std::string PeerKey(const grpc::CallbackServerContext& context, absl::string_view identity) {
  return identity.empty() ? PeerOf(context.peer(), ConnectionNumber(context)) : std::string(identity);
}

std::string PeerOf(absl::string_view uri, uint64_t connection) {
  if (absl::StartsWith(uri, "inproc")) return "";
  if (absl::StartsWith(uri, "unix:")) return absl::StrCat(kUnixPeer, absl::Hex(connection));
  const bool is_ipv4 = absl::ConsumePrefix(&uri, "ipv4:");
  const bool is_ipv6 = !is_ipv4 && absl::ConsumePrefix(&uri, "ipv6:");
  if (!is_ipv4 && !is_ipv6) return std::string(uri);
  const std::string text = absl::StrReplaceAll(uri, {{"%5B", "["}, {"%5D", "]"}, {"%25", "%"}});
  if (IsLoopbackPeer(text)) return text;
  return text.substr(0, text.rfind(':'));
}

}  // namespace lossd::rpc
