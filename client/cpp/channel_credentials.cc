// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/channel_credentials.h"

#include <grpcpp/support/client_interceptor.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/cpp/argument_error.h"
#include "client/cpp/diagnosis.h"
#include "client/cpp/probe.h"
#include "client/cpp/probe_tls.h"
#include "client/cpp/target.h"

namespace lossd::client {
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

class MadeCredentials final : public ChannelCredentials {
 public:
  // `pem`: the contents of the files.
  MadeCredentials(CredentialOptions options, CredentialOptions pem)
      : options_(std::move(options)), pem_(std::move(pem)) {}

  absl::Status CheckTarget(const std::string& target) const override {
    if (options_.token.empty() || has_tls() || IsLocalTarget(target)) return absl::OkStatus();
    return ArgumentError(
        "options.credentials.ca", "nothing",
        absl::StrCat("is not given (LOSSD_CA); without TLS the token would go to ", target, " unencrypted"));
  }

  std::shared_ptr<grpc::Channel> Open(const std::string& target,
                                      const grpc::ChannelArguments& arguments) const override {
    const auto credentials =
        has_tls() ? grpc::SslCredentials({pem_.ca, pem_.key, pem_.cert}) : grpc::InsecureChannelCredentials();
    if (options_.token.empty()) return grpc::CreateCustomChannel(target, credentials, arguments);
    std::vector<std::unique_ptr<grpc::experimental::ClientInterceptorFactoryInterface>> interceptors;
    interceptors.push_back(std::make_unique<TokenInterceptorFactory>(options_.token));
    return grpc::experimental::CreateCustomChannelWithInterceptors(target, credentials, arguments,
                                                                   std::move(interceptors));
  }

  absl::Status Diagnose(const std::string& target) const override {
    return Explain(Probe(target, {pem_.ca, pem_.cert, pem_.key}), target, options_);
  }

 private:
  bool has_tls() const { return !options_.ca.empty(); }

  const CredentialOptions options_;
  const CredentialOptions pem_;
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

}  // namespace internal

std::shared_ptr<const Credentials> Credentials::Insecure() {
  return std::make_shared<internal::MadeCredentials>(CredentialOptions(), CredentialOptions());
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
  return std::make_shared<internal::MadeCredentials>(options, std::move(pem));
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
