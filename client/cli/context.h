// What every command gets: the global options, a way to the server, and where to print.
//
// Thread-compatible; commands run on the main thread.
#ifndef LOSSD_CLIENT_CLI_CONTEXT_H_
#define LOSSD_CLIENT_CLI_CONTEXT_H_

#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"

namespace lossd::cli {

inline constexpr char kDefaultServer[] = "127.0.0.1:7070";
inline constexpr int kDefaultHttpPort = 7071;

struct Context {
  // Global options.
  std::string server = kDefaultServer;
  client::CredentialOptions credentials;
  bool json = false;
  double timeout_seconds = 0;  // 0: each call's default
  int attempts = client::RetryOptions().max_attempts;
  uint64_t incarnation = 0;  // that the server must have; 0: any

  // The command chosen, set while the command line is parsed. Its status becomes the exit code.
  std::function<absl::Status()> action;
  // Set by an action that did its work but has bad news (an unhealthy server).
  bool bad_news = false;

  absl::StatusOr<std::unique_ptr<client::Client>> Connect(std::optional<int> channels = 1,
                                                          const std::string& transport = "") const;
  absl::Duration timeout() const { return absl::Seconds(timeout_seconds); }
  // "host:port" of the server's HTTP side, or "https://host:port": `http` if not empty, else the server's
  // host with port 7071.
  std::string HttpAddress(const std::string& http) const;

  void Print(absl::string_view text) const;                      // to stdout
  void PrintJson(const nlohmann::ordered_json& document) const;  // to stdout, indented
};

// True if stderr is a terminal: then long work may show its progress there.
bool ShowsProgress();

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_CONTEXT_H_
