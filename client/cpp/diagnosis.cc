// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/diagnosis.h"

#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "client/cpp/target.h"
#include "kernels/errors/field_error.h"

namespace lossd::client::internal {
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

}  // namespace lossd::client::internal
