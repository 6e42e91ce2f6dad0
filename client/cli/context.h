// SPDX-License-Identifier: Apache-2.0
// What every command gets (Context): the global options, a way to the server, and where to print; and what
// lossctl says and ends with when a command fails.
//
// Context is thread-compatible: commands run on the main thread. Functions are stateless and thread-safe.
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

// What the command line says of the server; empty: nothing.
struct ServerFlags {
  std::string server;
  std::string context;  // the name of one in the file of contexts
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
  uint64_t incarnation = 0;  // that the server must have; 0: any

  // Set by Settle.
  std::string server;
  client::CredentialOptions credentials;
  std::string named_http;  // the HTTP address of the context in use, or empty
  std::string in_use;      // its name; empty: the server comes from elsewhere

  // The command chosen, set while the command line is parsed. Its status becomes the exit code.
  std::function<absl::Status()> action;
  // Set by an action that did its work but has bad news (an unhealthy server).
  bool bad_news = false;

  // Decides which server it is and how to prove who asks, once: client::ChooseServer, with the current
  // context; --server goes before --context.
  absl::Status Settle();

  // All but one of these Settle first.
  absl::StatusOr<std::unique_ptr<client::Client>> Connect();  // with one connection
  // `options` say how rows travel; who the server is and how long to wait for it is filled in.
  absl::StatusOr<std::unique_ptr<client::Client>> Connect(client::ClientOptions options);
  // "http://host:port" of the server's HTTP side, or "https://...": `given` (--http) if not empty, else that
  // of the context, else where the server says it is, for which a connection is made.
  absl::StatusOr<std::string> HttpAddress(const std::string& given);
  // The same of a server that has said it already; the context is settled.
  absl::StatusOr<std::string> HttpAddress(const std::string& given, const v1::ServerDescription& said) const;
  // The same for a probe, which does not ask over gRPC: else port 7071 of the server's host.
  absl::StatusOr<std::string> ProbeAddress(const std::string& given);

  absl::Duration timeout() const { return absl::Seconds(timeout_seconds); }
  Style style() const { return {.wide = output == Output::kWide, .color = ColorsOn(1)}; }
  bool ColorsOn(int descriptor) const { return HasColor(color, descriptor); }

  void Print(absl::string_view text) const;  // to stdout
  // INTERNAL once something could not be printed: the disk is full, stdout is closed.
  absl::Status Printed() const;
  // To stdout, indented. The document of a command is an object; a list is a field of it
  // (docs/lossctl.md#documents-for-scripts).
  void PrintJson(const nlohmann::ordered_json& document) const;
  // One of several documents of a command that goes on: on one line.
  void PrintJsonOfMany(const nlohmann::ordered_json& document) const;

 private:
  bool settled_ = false;
  mutable int write_error_ = 0;  // errno
};

// True if stderr is a terminal: then long work may show its progress there.
bool ShowsProgress();

// Exit codes and error messages: what went wrong and what to do next. Pure functions, thread-safe.

enum ExitCode : int {
  kExitOk = 0,
  kExitFailed = 1,       // the operation failed
  kExitUsage = 2,        // the command line is wrong
  kExitUnreachable = 3,  // no server, or it stopped answering
  kExitRefused = 4,      // bad input, or the server is not in a state for it
  kExitRestarted = 5,    // the server is another process than before; gradients of the open step are gone
};

ExitCode ExitCodeOf(const absl::Status& status);

// INVALID_ARGUMENT of a command line, with kExitUsage. `help` is the command that describes what is right.
absl::Status UsageError(absl::string_view message, absl::string_view help);

// For stderr: "lossctl: ..." with details and advice, ending in a newline. Large numbers of bytes stand there
// in larger units, too. With `json` one JSON object on one line.
std::string ErrorText(const absl::Status& status, bool json, const Style& style = {});

// "needs 1610612736 bytes; 5 of 8589934592 bytes" as "needs 1610612736 bytes (1.50 GiB); 5 of 8589934592
// bytes (8.00 GiB)".
std::string WithUnits(absl::string_view message);

// With the command line's names for what the client library calls "options.target" and
// "options.credentials.ca", at the beginning of a message.
std::string InTermsOfOptions(absl::string_view message);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_CONTEXT_H_
