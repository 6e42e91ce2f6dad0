// SPDX-License-Identifier: Apache-2.0
// Context: what every command of lossctl gets, namely the global options, a connection to the server, and a
// place to print. This header also defines lossctl's exit codes and error messages.
//
// Context is thread-compatible: commands run on the main thread. The functions are stateless and thread-safe.
#ifndef LOSSD_CLIENT_CLI_CONTEXT_H_
#define LOSSD_CLIENT_CLI_CONTEXT_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/cli/format.h"
#include "client/cpp/client.h"

namespace lossd::cli {

enum class Output : uint8_t { kTable, kWide, kJson };

// What the command line says about the server. An empty text means: not given.
struct ServerFlags {
  std::string server;
  std::string context;  // the name of a server in the file of contexts (docs/lossctl.md)
  std::string ca, cert, key;
};

struct Context {
  // Global options.
  ServerFlags flags;
  Output output = Output::kTable;
  bool json = false;  // `output` is kJson
  ColorMode color = ColorMode::kAuto;
  double timeout_seconds = 0;  // 0: each call's default
  int attempts = client::RetryOptions().max_attempts;
  uint64_t incarnation = 0;  // the one that the server must have; 0: any

  // Settle() sets the following four.
  std::string server;
  client::CredentialOptions credentials;
  std::string named_http;  // the HTTP address of the context in use; may be empty
  std::string in_use;      // the name of the context in use; empty: the server comes from elsewhere

  // The chosen command, set while the command line is parsed. The status that it returns becomes the exit
  // code.
  std::function<absl::Status()> action;
  // An action sets bad_news if it did its work but what it found is bad, such as an unhealthy server.
  bool bad_news = false;

  // Decides once which server is used and with which credentials: see client::ChooseServer, here with the
  // current context. --server takes precedence over --context.
  absl::Status Settle();

  // The following functions call Settle first, except the second HttpAddress, which expects that it was
  // called.
  absl::StatusOr<std::unique_ptr<client::Client>> Connect();  // with one connection
  // `options` say how rows travel. The function fills in the server, its credentials, timeouts and retries.
  absl::StatusOr<std::unique_ptr<client::Client>> Connect(client::ClientOptions options);
  // The address of the server's HTTP side, "http://host:port" or "https://host:port": `given` (--http) if it
  // is not empty, else the address in the context, else what the server says, for which the function connects
  // to it.
  absl::StatusOr<std::string> HttpAddress(const std::string& given);
  // The same, where the server's description `said` is at hand already.
  absl::StatusOr<std::string> HttpAddress(const std::string& given, const v1::ServerDescription& said) const;
  // The same for a probe, which makes no gRPC call: in place of asking the server, port 7071 of its host.
  absl::StatusOr<std::string> ProbeAddress(const std::string& given);

  absl::Duration timeout() const { return absl::Seconds(timeout_seconds); }
  Style style() const { return {.wide = output == Output::kWide, .color = ColorsOn(1)}; }
  bool ColorsOn(int descriptor) const { return HasColor(color, descriptor); }

  void Print(absl::string_view text) const;  // to stdout
  // INTERNAL if something could not be printed, because the disk is full or stdout is closed.
  absl::Status Printed() const;
  // Prints to stdout, indented. A command prints one JSON object; a list is a field of it
  // (docs/lossctl.md#documents-for-scripts).
  void PrintJson(const nlohmann::ordered_json& document) const;
  // The same on one line, for a command that prints several documents, one after the other.
  void PrintJsonOfMany(const nlohmann::ordered_json& document) const;

 private:
  bool settled_ = false;
  mutable int write_error_ = 0;  // errno
};

// True if stderr is a terminal, so that a long operation may show its progress there.
bool ShowsProgress();

// The rest of this header: exit codes, and error messages that say what went wrong and what to do next. Pure
// functions, thread-safe.

enum ExitCode : int {
  kExitOk = 0,
  kExitFailed = 1,       // the operation failed
  kExitUsage = 2,        // the command line is wrong
  kExitUnreachable = 3,  // no server, or it stopped answering
  kExitRefused = 4,      // bad input, or the server is not in a state for it
  kExitRestarted = 5,    // the server is another process than before; gradients of the open step are gone
};

ExitCode ExitCodeOf(const absl::Status& status);

// INVALID_ARGUMENT for a wrong command line, with exit code kExitUsage. `help` is the lossctl command that
// prints the right usage.
absl::Status UsageError(absl::string_view message, absl::string_view help);

// The text for stderr: "lossctl: ..." with details and advice, ending in a newline. Large numbers of bytes
// are followed by the same size in a larger unit. With `json` the text is one JSON object on one line.
std::string ErrorText(const absl::Status& status, bool json, const Style& style = {});

// Adds larger units: "needs 1610612736 bytes; 5 of 8589934592 bytes" becomes "needs 1610612736 bytes (1.50
// GiB); 5 of 8589934592 bytes (8.00 GiB)".
std::string WithUnits(absl::string_view message);

// Replaces the client library's names at the beginning of a message, such as "options.target" and
// "options.credentials.ca", by the names of lossctl's options.
std::string InTermsOfOptions(absl::string_view message);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_CONTEXT_H_
