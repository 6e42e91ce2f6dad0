// SPDX-License-Identifier: Apache-2.0
#include "client/cli/context.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "client/cli/contexts.h"
#include "client/cli/format.h"
#include "client/cli/http.h"
#include "client/cli/json.h"
#include "kernels/errors/field_error.h"

namespace lossd::cli {
namespace {

const std::string& FirstOf(const std::string& a, const std::string& b) { return a.empty() ? b : a; }

absl::Status NoSuchContext(const std::string& path, const std::string& name, const Contexts& contexts) {
  const std::string known = absl::StrJoin(
      contexts.by_name, ", ", [](std::string* out, const auto& each) { out->append(each.first); });
  return errors::WithViolation(absl::NotFoundError(absl::StrCat(
                                   "there is no context \"", name, "\" in ", path.empty() ? "any file" : path,
                                   known.empty() ? ", which has none" : "; it has ", known)),
                               {"context", "must be one that was added", name});
}

}  // namespace

absl::Status Context::Settle() {
  if (settled_) return absl::OkStatus();
  const std::string path = ContextsPath();
  if (!flags.server.empty()) {
    server = flags.server;
  } else if (!flags.context.empty()) {
    if (absl::Status status = UseContext(path, flags.context); !status.ok()) return status;
  } else if (const std::string named = EnvironmentVariable("LOSSD_SERVER"); !named.empty()) {
    server = named;
  } else if (absl::Status status = UseContext(path, EnvironmentVariable("LOSSD_CONTEXT")); !status.ok()) {
    return status;
  }
  // What options and environment say goes before the context's. A certificate and its key are a pair.
  const client::CredentialOptions environment = client::Credentials::OptionsFromEnvironment();
  const auto prefer = [](const std::string& flag, const std::string& variable, std::string* value) {
    if (!FirstOf(flag, variable).empty()) *value = FirstOf(flag, variable);
  };
  prefer(flags.ca, environment.ca, &credentials.ca);
  const std::string& cert = FirstOf(flags.cert, environment.cert);
  const std::string& key = FirstOf(flags.key, environment.key);
  if (!cert.empty() || !key.empty()) {
    credentials.cert = cert;
    credentials.key = key;
  }
  prefer("", environment.token, &credentials.token);
  settled_ = true;
  return absl::OkStatus();
}

// "": the current one, if there is one.
absl::Status Context::UseContext(const std::string& path, const std::string& name) {
  if (path.empty() && name.empty()) return absl::OkStatus();
  const absl::StatusOr<Contexts> contexts = ReadContexts(path);
  if (!contexts.ok()) return contexts.status();
  const std::string& wanted = FirstOf(name, contexts->current);
  if (wanted.empty()) return absl::OkStatus();
  const auto found = contexts->by_name.find(wanted);
  if (found == contexts->by_name.end()) return NoSuchContext(path, wanted, *contexts);
  const NamedServer& named = found->second;
  in_use = wanted;
  server = named.server;
  named_http = named.http;
  credentials.ca = PathBeside(path, named.ca);
  credentials.cert = PathBeside(path, named.cert);
  credentials.key = PathBeside(path, named.key);
  if (named.token_file.empty() || !EnvironmentVariable("LOSSD_TOKEN").empty()) return absl::OkStatus();
  absl::StatusOr<std::string> token = ReadTokenFile(PathBeside(path, named.token_file));
  if (!token.ok()) return token.status();
  credentials.token = *std::move(token);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<client::Client>> Context::Connect() {
  client::ClientOptions options;
  options.channels = 1;
  return Connect(std::move(options));
}

absl::StatusOr<std::unique_ptr<client::Client>> Context::Connect(client::ClientOptions options) {
  if (absl::Status status = Settle(); !status.ok()) return status;
  auto made = client::Credentials::Create(credentials);
  if (!made.ok()) return made.status();
  options.target = server;
  options.credentials = *std::move(made);
  options.connect_timeout = absl::Seconds(5);
  options.wait_for_server = false;
  options.retry.max_attempts = attempts;
  options.expected_incarnation = incarnation;
  if (timeout_seconds > 0) {
    options.connect_timeout = timeout();
    options.call_timeout = options.transfer_timeout = options.loss_timeout = timeout();
  }
  return client::Client::Connect(options);
}

absl::StatusOr<std::string> Context::HttpAddress(const std::string& given) {
  if (absl::Status status = Settle(); !status.ok()) return status;
  if (!given.empty()) return given;
  if (!named_http.empty()) return named_http;
  const auto client = Connect();
  if (!client.ok()) return client.status();
  const absl::StatusOr<v1::ServerDescription> said = (*client)->GetServer(timeout());
  if (!said.ok()) return said.status();
  return HttpAddressOf(*said, server);
}

absl::StatusOr<std::string> Context::HttpAddress(const std::string& given,
                                                 const v1::ServerDescription& said) const {
  if (!given.empty()) return given;
  return named_http.empty() ? HttpAddressOf(said, server) : named_http;
}

absl::StatusOr<std::string> Context::ProbeAddress(const std::string& given) {
  if (absl::Status status = Settle(); !status.ok()) return status;
  if (!given.empty()) return given;
  return named_http.empty() ? DefaultHttpAddress(server) : named_http;
}

void Context::Print(absl::string_view text) const {
  const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  if ((std::fflush(stdout) != 0 || !written) && write_error_ == 0) write_error_ = errno;
}

absl::Status Context::Printed() const {
  if (write_error_ == 0) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("cannot write to the standard output: ", std::generic_category().message(write_error_)));
}

void Context::PrintJson(const Json& document) const {
  Print(absl::StrCat(document.dump(2, ' ', false, Json::error_handler_t::replace), "\n"));
}

void Context::PrintJsonOfMany(const Json& document) const {
  Print(absl::StrCat(document.dump(-1, ' ', false, Json::error_handler_t::replace), "\n"));
}

bool ShowsProgress() { return isatty(STDERR_FILENO) != 0; }

}  // namespace lossd::cli
