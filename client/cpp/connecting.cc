// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/connecting.h"

#include <grpcpp/support/client_interceptor.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "client/cpp/call_errors.h"
#include "client/cpp/client.h"
#include "client/cpp/connections.h"
#include "client/cpp/core.h"
#include "client/cpp/probe.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/field_error.h"
#include "lossd/v1/server.grpc.pb.h"
#include "proto/wire/status_details.h"

namespace lossd::client {

// ---- Credentials ----

namespace internal {
namespace {

// Puts the token on every call.
class TokenInterceptor final : public grpc::experimental::Interceptor {
 public:
  explicit TokenInterceptor(const std::string& token) : authorization_(absl::StrCat("Bearer ", token)) {}
  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(
            grpc::experimental::InterceptionHookPoints::PRE_SEND_INITIAL_METADATA)) {
      methods->GetSendInitialMetadata()->emplace("authorization", authorization_);
    }
    methods->Proceed();
  }

 private:
  const std::string authorization_;
};

class TokenInterceptorFactory final : public grpc::experimental::ClientInterceptorFactoryInterface {
 public:
  explicit TokenInterceptorFactory(std::string token) : token_(std::move(token)) {}
  grpc::experimental::Interceptor* CreateClientInterceptor(grpc::experimental::ClientRpcInfo*) override {
    return new TokenInterceptor(token_);
  }

 private:
  const std::string token_;
};

absl::Status ReadPem(const char* option, const std::string& path, std::string* content) {
  if (path.empty()) return absl::OkStatus();
  // Not a stream, which throws for a folder.
  if (FILE* const file = std::fopen(path.c_str(), "rb"); file != nullptr) {
    char part[4096];
    while (const size_t count = std::fread(part, 1, sizeof(part), file)) content->append(part, count);
    const bool whole = std::ferror(file) == 0;
    std::fclose(file);
    if (whole && !content->empty()) return absl::OkStatus();
  }
  return ArgumentError(absl::StrCat("options.credentials.", option), path,
                       absl::StrCat("is \"", path, "\", which cannot be read or is empty"));
}

absl::Status FileError(const FileProblem& found, const CredentialOptions& options) {
  const std::string& path = found.option == "ca"     ? options.ca
                            : found.option == "cert" ? options.cert
                                                     : options.key;
  return ArgumentError(absl::StrCat("options.credentials.", found.option), path,
                       absl::StrCat("is \"", path, "\", ", found.problem));
}

absl::Status Check(const CredentialOptions& options) {
  if (options.cert.empty() != options.key.empty()) {
    return ArgumentError(
        options.cert.empty() ? "options.credentials.cert" : "options.credentials.key", "nothing",
        "is not given; a certificate and its key are given together (LOSSD_CERT, LOSSD_KEY)");
  }
  if (!options.cert.empty() && options.ca.empty()) {
    return ArgumentError("options.credentials.ca", "nothing",
                         "is not given (LOSSD_CA); a client certificate is for TLS");
  }
  const bool visible = std::all_of(options.token.begin(), options.token.end(),
                                   [](char c) { return absl::ascii_isgraph(static_cast<unsigned char>(c)); });
  if (!visible) {  // the value is a secret
    return ArgumentError("options.credentials.token", "something else",
                         "must be of visible ASCII characters");
  }
  return absl::OkStatus();
}

std::string Environment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

absl::Status ChannelCredentials::CheckTarget(const std::string& target) const {
  if (options_.token.empty() || has_tls() || IsLocalTarget(target)) return absl::OkStatus();
  return ArgumentError(
      "options.credentials.ca", "nothing",
      absl::StrCat("is not given (LOSSD_CA); without TLS the token would go to ", target, " unencrypted"));
}

std::shared_ptr<grpc::Channel> ChannelCredentials::Open(const std::string& target,
                                                        const grpc::ChannelArguments& arguments) const {
  const auto credentials =
      has_tls() ? grpc::SslCredentials({pem_.ca, pem_.key, pem_.cert}) : grpc::InsecureChannelCredentials();
  if (options_.token.empty()) return grpc::CreateCustomChannel(target, credentials, arguments);
  std::vector<std::unique_ptr<grpc::experimental::ClientInterceptorFactoryInterface>> interceptors;
  interceptors.push_back(std::make_unique<TokenInterceptorFactory>(options_.token));
  return grpc::experimental::CreateCustomChannelWithInterceptors(target, credentials, arguments,
                                                                 std::move(interceptors));
}

absl::Status ChannelCredentials::Diagnose(const std::string& target) const {
  return Explain(Probe(target, {pem_.ca, pem_.cert, pem_.key}), target, options_);
}

}  // namespace internal

std::shared_ptr<const Credentials> Credentials::Insecure() {
  return std::make_shared<internal::ChannelCredentials>(CredentialOptions(), CredentialOptions());
}

absl::StatusOr<std::shared_ptr<const Credentials>> Credentials::Create(const CredentialOptions& options) {
  CredentialOptions pem;
  absl::Status status = internal::Check(options);
  status.Update(internal::ReadPem("ca", options.ca, &pem.ca));
  status.Update(internal::ReadPem("cert", options.cert, &pem.cert));
  status.Update(internal::ReadPem("key", options.key, &pem.key));
  if (!status.ok()) return status;
  const internal::FileProblem found = internal::ProblemOf({pem.ca, pem.cert, pem.key});
  if (!found.option.empty()) return internal::FileError(found, options);
  return std::make_shared<internal::ChannelCredentials>(options, std::move(pem));
}

CredentialOptions Credentials::OptionsFromEnvironment() {
  return {.ca = internal::Environment("LOSSD_CA"),
          .cert = internal::Environment("LOSSD_CERT"),
          .key = internal::Environment("LOSSD_KEY"),
          .token = std::string(absl::StripAsciiWhitespace(internal::Environment("LOSSD_TOKEN")))};
}

absl::StatusOr<std::shared_ptr<const Credentials>> Credentials::FromEnvironment() {
  return Create(OptionsFromEnvironment());
}

std::string TargetFromEnvironment() {
  std::string target = internal::Environment("LOSSD_SERVER");
  return target.empty() ? absl::StrCat("127.0.0.1:", internal::kDefaultPort) : target;
}

}  // namespace lossd::client

namespace lossd::client::internal {

// ---- Diagnosis ----

namespace {

absl::Status NoAnswer(const std::string& target) {
  const HostAndPort at = HostAndPortOf(target);
  return NoServerError(target, absl::StrCat(at.host, " does not answer on port ", at.port,
                                            ". Is the address right, and does a firewall let this machine "
                                            "through?"));
}

absl::Status NoTrust(const std::string& target, const std::string& why, const CredentialOptions& options) {
  return absl::UnauthenticatedError(absl::StrCat("the certificate of the server at ", target,
                                                 " is not trusted: ", why, " (authorities: ", options.ca,
                                                 ")"));
}

absl::Status RefusedCertificate(const std::string& target, const CredentialOptions& options) {
  return absl::UnauthenticatedError(
      absl::StrCat("the server at ", target,
                   " ended the TLS handshake: it wants a client certificate that its authority has "
                   "signed (LOSSD_CERT, LOSSD_KEY)",
                   options.cert.empty() ? "" : ", and refused the one of ", options.cert));
}

}  // namespace

absl::Status NoServerError(const std::string& target, absl::string_view why) {
  return errors::WithViolation(
      absl::UnavailableError(absl::StrCat("no server at ", target, why.empty() ? "" : ": ", why)),
      {std::string(kTargetField), "must be the address of a server", target});
}

absl::Status Explain(const Finding& finding, const std::string& target, const CredentialOptions& options) {
  switch (finding.found) {
    case Found::kUnknown:
      return absl::OkStatus();
    case Found::kNoHost:
      return NoServerError(
          target, absl::StrCat(finding.why, ". Is '", HostAndPortOf(target).host, "' spelled right?"));
    case Found::kNoAnswer:
      return NoAnswer(target);
    case Found::kRefused:
      return NoServerError(target, "the connection was refused, because nothing listens there");
    case Found::kUnreachable:
      return NoServerError(target, finding.why);
    case Found::kClosed:
      return NoServerError(target,
                           "the connection was closed before a word was said. It may be a proxy or a tunnel "
                           "whose server is gone, or a server that has too many connections");
    case Found::kHttp2:
      return absl::FailedPreconditionError(absl::StrCat(
          "the server at ", target,
          " does not speak TLS, and this client does: give no certificate authority (LOSSD_CA)"));
    case Found::kHttp1:
      return absl::FailedPreconditionError(absl::StrCat(
          "what listens at ", target,
          " is an HTTP server, not lossd's gRPC port. Of a lossd this is the port of --http; give "
          "that of --listen"));
    case Found::kOther:
      return absl::FailedPreconditionError(
          absl::StrCat("what listens at ", target,
                       " does not speak gRPC: it is another program than lossd, or another port"));
    case Found::kTls:
      return absl::FailedPreconditionError(
          absl::StrCat("the server at ", target,
                       " speaks TLS and this client does not: name the certificate authority (LOSSD_CA)"));
    case Found::kNotTrusted:
      return NoTrust(target, finding.why, options);
    case Found::kNoClientCert:
      return RefusedCertificate(target, options);
    case Found::kTlsOther:
      return absl::FailedPreconditionError(
          absl::StrCat("what listens at ", target,
                       " speaks TLS, but does not speak gRPC: it is another program than lossd"));
  }
  return absl::OkStatus();
}

// ---- The first call ----

namespace {

// Before the reason for a silence is looked for.
constexpr absl::Duration kSilencePatience = absl::Milliseconds(500);
constexpr absl::Duration kRound = absl::Seconds(5);         // before the next looks
constexpr absl::Duration kPause = absl::Milliseconds(200);  // before the next call

absl::StatusOr<v1::ServerDescription> Ask(const std::shared_ptr<grpc::Channel>& channel, absl::Time deadline,
                                          bool wait_for_ready) {
  grpc::ClientContext context;
  context.set_deadline(wire::GrpcTime(deadline));
  context.set_wait_for_ready(wait_for_ready);
  v1::ServerDescription description;
  const grpc::Status status =
      v1::ServerService::NewStub(channel)->GetServer(&context, v1::GetServerRequest(), &description);
  if (!status.ok()) return wire::FromGrpcStatus(status);
  return description;
}

// An error of the first call that says who is there.
absl::Status Refusal(const absl::Status& status, const std::string& target) {
  if (absl::IsUnimplemented(status)) {
    return absl::UnimplementedError(absl::StrCat(
        "the gRPC server at ", target, " does not know lossd.v1, the protocol of this client (lossd ",
        ClientVersion(), "): it is another program, or a lossd of another version (", status.message(), ")"));
  }
  return status;
}

// Whether the server lets this client see nothing of it.
bool KnowsNot(const absl::Status& status) {
  return absl::IsUnauthenticated(status) || absl::IsPermissionDenied(status);
}

// Whether another call may end otherwise.
bool MayPass(const absl::Status& status) { return IsTransient(status) || absl::IsDeadlineExceeded(status); }

// `reason`: what was found last; OK: nothing.
absl::Status GaveUp(const absl::Status& reason, const ClientOptions& options) {
  const std::string waited = absl::FormatDuration(options.connect_timeout);
  if (!reason.ok()) {
    return errors::WithMessage(reason, absl::StrCat(reason.message(), "; waited ", waited));
  }
  return absl::UnavailableError(
      absl::StrCat("the server at ", options.target, CanProbe(options.target) ? " takes connections but" : "",
                   " has not answered within ", waited, ": it is busy, or it is another program than lossd"));
}

// Why a call ended with `status`, as far as it can be found out. OK: nothing was found, and it may be sent
// again.
absl::Status Reason(const absl::Status& status, bool first, const ChannelCredentials& credentials,
                    const std::string& target) {
  absl::Status reason = credentials.Diagnose(target);
  // An error of the first call may be one of the connection, and of a server that has come up meanwhile.
  const bool tells = absl::IsUnavailable(status) && !(first && CanProbe(target));
  return reason.ok() && tells ? NoServerError(target, status.message()) : reason;
}

}  // namespace

absl::StatusOr<v1::ServerDescription> AwaitServer(const std::shared_ptr<grpc::Channel>& channel,
                                                  const ChannelCredentials& credentials,
                                                  const ClientOptions& options, absl::Time deadline) {
  for (bool first = true;; first = false) {
    const absl::Time end = std::min(deadline, clocks::SteadyNow() + (first ? kSilencePatience : kRound));
    absl::StatusOr<v1::ServerDescription> server = Ask(channel, end, /*wait_for_ready=*/!first);
    if (server.ok()) return server;
    // A server that tells nothing to this client may still say whether it serves; other calls will say why.
    if (KnowsNot(server.status()) && options.expected_incarnation == 0) return v1::ServerDescription();
    if (!MayPass(server.status())) return Refusal(server.status(), options.target);
    const absl::Status reason = Reason(server.status(), first, credentials, options.target);
    const bool waits = reason.ok() || (absl::IsUnavailable(reason) && options.wait_for_server);
    if (!waits) return reason;
    if (clocks::SteadyNow() >= deadline) return GaveUp(reason, options);
    absl::SleepFor(std::min(kPause, deadline - clocks::SteadyNow()));
  }
}

}  // namespace lossd::client::internal
