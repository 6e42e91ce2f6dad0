#include "client/cli/context.h"

#include <unistd.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"

namespace lossd::cli {

absl::StatusOr<std::unique_ptr<client::Client>> Context::Connect(std::optional<int> channels,
                                                                 const std::string& transport) const {
  auto made = client::Credentials::Create(credentials);
  if (!made.ok()) return made.status();
  client::ClientOptions options;
  options.target = server;
  options.credentials = *std::move(made);
  options.channels = channels;
  if (!transport.empty()) options.transport = transport;
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

std::string Context::HttpAddress(const std::string& http) const {
  if (!http.empty()) return http;
  return absl::StrCat(server.substr(0, server.rfind(':')), ":", kDefaultHttpPort);
}

void Context::Print(absl::string_view text) const {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

void Context::PrintJson(const nlohmann::ordered_json& document) const {
  Print(absl::StrCat(document.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace), "\n"));
}

bool ShowsProgress() { return isatty(STDERR_FILENO) != 0; }

}  // namespace lossd::cli
