// SPDX-License-Identifier: Apache-2.0
// What every command gets (Context): the global options, a way to the server, and where to print; the named
// servers that a person keeps in a file (Contexts); and what lossctl says and ends with when a command fails.
//
// Context is thread-compatible: commands run on the main thread. Functions are stateless and thread-safe.
#ifndef LOSSD_CLIENT_CLI_CONTEXT_H_
#define LOSSD_CLIENT_CLI_CONTEXT_H_

#include <cstddef>
#include <functional>
#include <map>
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
  // To stdout, indented. The document of a command is an object; a list is a field of it
  // (docs/lossctl.md#documents-for-scripts).
  void PrintJson(const nlohmann::ordered_json& document) const;
  // One of several documents of a command that goes on: on one line.
  void PrintJsonOfMany(const nlohmann::ordered_json& document) const;

 private:
  absl::Status UseContext(const std::string& path, const std::string& name);

  bool settled_ = false;
  mutable int write_error_ = 0;  // errno
};

// True if stderr is a terminal: then long work may show its progress there.
bool ShowsProgress();

// Named servers: the file in which a person keeps the addresses, certificates and token files of the servers
// that they use. client/python/src/lossd/_contexts.py reads the same file, and
// tests/client/contexts/cases.json has cases of both.
//
//   {
//     "current": "lab",
//     "contexts": {
//       "lab": {"server": "gpu-7:7070", "ca": "ca.pem", "cert": "me.pem", "key": "me.key",
//               "token_file": "token"}
//     }
//   }
//
// Paths are relative to the file's folder. The file has no token in it: a token is in a file of its own,
// which nobody else may read. The file also holds the functions that read and replace such private files.
//
// Functions are stateless and thread-safe; FolderLock keeps other programs out. Errors name the file and the
// line.

// Who may do what with a small file that belongs to one user.
enum class Privacy {
  kOthersMustNotWrite,
  // Not a group either, unless the file belongs to root, as systemd and Kubernetes hand secrets out.
  kOthersMustNotRead,
};

// NOT_FOUND if there is none; PERMISSION_DENIED if it may not be read, belongs to another user than this one
// or root, or is less private than that, with what mends it; INVALID_ARGUMENT if it is no file or longer than
// `most_bytes`.
absl::StatusOr<std::string> ReadPrivateFile(const std::string& path, Privacy privacy, size_t most_bytes);

// Replaces the file, or makes it, with mode 0600; readers see the old or the new content. A link is followed.
absl::Status WritePrivateFile(const std::string& path, const std::string& content);

// While one lives, other programs that ask for the same one wait. Makes the folder, with mode 0700, if it is
// not there. Move-only.
class FolderLock {
 public:
  // Of the folder that `path` is in. UNAVAILABLE if another program has it for five seconds.
  static absl::StatusOr<FolderLock> Of(const std::string& path);
  FolderLock(FolderLock&& other) noexcept;
  FolderLock& operator=(FolderLock&&) = delete;
  ~FolderLock();

 private:
  explicit FolderLock(int descriptor) : descriptor_(descriptor) {}
  int descriptor_;
};

// One server with a name. Empty: not given.
struct NamedServer {
  std::string server;  // as --server takes it; not empty
  std::string ca, cert, key, token_file;
  std::string http;  // as --http of metrics takes it

  friend bool operator==(const NamedServer&, const NamedServer&) = default;
};

struct Contexts {
  std::string current;  // one of the names, or empty
  std::map<std::string, NamedServer> by_name;

  friend bool operator==(const Contexts&, const Contexts&) = default;
};

// The path of the file: the environment variable LOSSD_CONFIG, else lossd/contexts.json in XDG_CONFIG_HOME,
// else in ~/.config. Empty if there is no home.
std::string ContextsPath();

// INVALID_ARGUMENT unless it is 1 to 64 characters out of A-Z a-z 0-9 . _ -, beginning with none of the last
// three.
absl::Status CheckContextName(absl::string_view name);

// The contexts in a text that was read from `path`.
absl::StatusOr<Contexts> ParseContexts(absl::string_view text, const std::string& path);
// None if there is no file. PERMISSION_DENIED if others may write to it, INVALID_ARGUMENT if it is not in
// order.
absl::StatusOr<Contexts> ReadContexts(const std::string& path);
// Changes the file as a whole or not at all, also when others change it at the same time; makes it, and its
// folder, if it is not there, for its owner alone. An error of `change` changes nothing.
absl::Status ChangeContexts(const std::string& path, const std::function<absl::Status(Contexts*)>& change);

// `file` as the contexts file at `path` means it.
std::string PathBeside(const std::string& path, const std::string& file);

// The token in a file: its one line. PERMISSION_DENIED unless only the owner may read it, who is the user or
// root; or, if it belongs to root, a group.
absl::StatusOr<std::string> ReadTokenFile(const std::string& path);

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
