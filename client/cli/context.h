// SPDX-License-Identifier: Apache-2.0
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
#include "client/cli/format.h"
#include "client/cpp/client.h"

namespace lossd::cli {

inline constexpr char kDefaultServer[] = "127.0.0.1:7070";

enum class Output : uint8_t { kTable, kWide, kJson };

// What the command line says of the server; empty: nothing.
struct ServerFlags {
  std::string server;
  std::string context;  // the name of one in the file of contexts.h
  std::string ca, cert, key;
};

struct Context {
  // Global options.
  ServerFlags flags;
  Output output = Output::kTable;
  bool json = false;  // `output` is a document, JSON or YAML: PrintJson prints it
  ColorMode color = ColorMode::kAuto;
  double timeout_seconds = 0;  // 0: each call's default
  int attempts = client::RetryOptions().max_attempts;
  uint64_t incarnation = 0;  // that the server must have; 0: any

  // Set by Settle.
  std::string server = kDefaultServer;
  client::CredentialOptions credentials;
  std::string named_http;  // the HTTP address of the context in use, or empty
  std::string in_use;      // its name; empty: the server comes from elsewhere

  // The command chosen, set while the command line is parsed. Its status becomes the exit code.
  std::function<absl::Status()> action;
  // Set by an action that did its work but has bad news (an unhealthy server).
  bool bad_news = false;

  // Decides which server it is and how to prove who asks, once. The server is, in this order: --server, that
  // of --context, LOSSD_SERVER, that of LOSSD_CONTEXT, that of the current context, kDefaultServer.
  // Certificates and the token come from options or the environment, and else from the context that named
  // the server: they are never shown to another one. Errors are the same as of the context's files.
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
  // To stdout, indented; as YAML if that was asked for.
  void PrintJson(const nlohmann::ordered_json& document) const;
  // One of several documents: on one line, or as one of a stream of YAML documents.
  void PrintJsonOfMany(const nlohmann::ordered_json& document) const;

 private:
  absl::Status UseContext(const std::string& path, const std::string& name);

  bool settled_ = false;
  mutable int write_error_ = 0;  // errno
};

// True if stderr is a terminal: then long work may show its progress there.
bool ShowsProgress();

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_CONTEXT_H_
