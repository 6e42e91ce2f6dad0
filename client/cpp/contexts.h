// SPDX-License-Identifier: Apache-2.0
// Contexts: a file in which a user keeps named servers, each with its address, certificates and token file.
// ChooseServer decides from this file, the environment and a program's arguments which server the program
// uses. tests/client/cpp/contexts.json has cases.
//
//   {
//     "current": "lab",
//     "contexts": {
//       "lab": {"server": "gpu-7:7070", "ca": "ca.pem", "cert": "me.pem", "key": "me.key",
//               "token_file": "token"}
//     }
//   }
//
// Paths are relative to the file's folder. The file contains no token: a token is in a file of its own, which
// no other user may read. This header also has the functions that read and replace such private files.
//
// Functions are stateless and thread-safe. FolderLock excludes other programs. Errors name the file and the
// line.
#ifndef LOSSD_CLIENT_CPP_CONTEXTS_H_
#define LOSSD_CLIENT_CPP_CONTEXTS_H_

#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/cpp/client_options.h"

namespace lossd::client {

// ---- Which server is meant ----

// The arguments about the server that a program was called with. Nullopt: the argument was not given, so the
// environment or a context decides. An empty ca, cert, key or token means none, even if the environment or
// the context has one.
struct ServerArguments {
  std::optional<std::string> server;
  std::optional<std::string> context;  // the name of a context in the file
  std::optional<std::string> ca, cert, key;
  std::optional<std::string> token;
};

struct ChosenServer {
  std::string server;  // a gRPC target name, not checked unless the environment names it
  CredentialOptions credentials;
  std::string context;  // the name of the context that gave the server; empty: no context did
  std::string http;     // the HTTP address of this context, or empty
};

// Whether ChooseServer uses the file's current context.
enum class CurrentContext { kCounts, kIsIgnored };

// Chooses the server: the first one given of arguments.server, the server of arguments.context, LOSSD_SERVER,
// the server of the context LOSSD_CONTEXT, the server of the file's current context (unless kIsIgnored),
// 127.0.0.1:7070.
// Certificates and the token come from arguments or the environment, or else from the context that gave the
// server; those of a context are never shown to another server. A certificate and its key come from the same
// source.
//
// INVALID_ARGUMENT with both a server and a context; NOT_FOUND for a context that is not in the file; the
// errors of ReadContexts and ReadTokenFile.
absl::StatusOr<ChosenServer> ChooseServer(const ServerArguments& arguments, CurrentContext current);

// ---- Private files ----

// Who may do what with a small file that belongs to one user.
enum class Privacy {
  kOthersMustNotWrite,
  // The file's group must not read it either, unless the file belongs to root: systemd and Kubernetes hand
  // out secrets in files that belong to root and that a group may read.
  kOthersMustNotRead,
};

// The content of the file. NOT_FOUND if there is no such file. PERMISSION_DENIED if this user may not read
// the file, if the file belongs neither to this user nor to root, or if its mode breaks `privacy`; the error
// then names the chmod that mends the mode. INVALID_ARGUMENT if `path` is not a regular file, or if the file
// is longer than `most_bytes`.
absl::StatusOr<std::string> ReadPrivateFile(const std::string& path, Privacy privacy, size_t most_bytes);

// Replaces the file, or makes it, with mode 0600. Readers see either the old content or the new one. Follows
// a symbolic link.
absl::Status WritePrivateFile(const std::string& path, const std::string& content);

// The lock of a folder. While a lock lives, other programs that ask for the lock of the same folder wait.
// FolderLock::Of makes the folder, with mode 0700, if it is not there. Move-only.
class FolderLock {
 public:
  // Locks the folder that `path` is in. UNAVAILABLE if another program holds the lock for five seconds.
  static absl::StatusOr<FolderLock> Of(const std::string& path);
  FolderLock(FolderLock&& other) noexcept;
  FolderLock& operator=(FolderLock&&) = delete;
  ~FolderLock();

 private:
  explicit FolderLock(int descriptor) : descriptor_(descriptor) {}
  int descriptor_;
};

// ---- The file of contexts ----

// One context: a server. An empty string means that the file does not give this value.
struct NamedServer {
  std::string server;  // an address as for lossctl's --server; not empty
  std::string ca, cert, key, token_file;
  std::string http;  // as --http of metrics takes it

  friend bool operator==(const NamedServer&, const NamedServer&) = default;
};

struct Contexts {
  std::string current;  // the name of the current context, or empty
  std::map<std::string, NamedServer> by_name;

  friend bool operator==(const Contexts&, const Contexts&) = default;
};

// The path of the file: the environment variable LOSSD_CONFIG, else lossd/contexts.json in XDG_CONFIG_HOME,
// else in ~/.config. Empty if there is no home.
std::string ContextsPath();

// INVALID_ARGUMENT unless the name has 1 to 64 characters out of A-Z a-z 0-9 . _ -, and does not begin with .
// _ or -.
absl::Status CheckContextName(absl::string_view name);

// Parses `text`, the content of the file `path`.
absl::StatusOr<Contexts> ParseContexts(absl::string_view text, const std::string& path);
// Reads the file; no contexts if there is no file. PERMISSION_DENIED if other users may write to it.
// INVALID_ARGUMENT if its content is wrong.
absl::StatusOr<Contexts> ReadContexts(const std::string& path);
// Reads the file, calls `change`, and writes the file. The change is atomic, even if other programs change
// the file at the same time. If the file or its folder is not there, makes it, accessible for its owner
// alone. If `change` returns an error, nothing is changed.
absl::Status ChangeContexts(const std::string& path, const std::function<absl::Status(Contexts*)>& change);

// The path of `file`, which the contexts file at `path` names. A relative `file` is in the folder of `path`.
std::string PathBeside(const std::string& path, const std::string& file);

// Reads the token, the one line of a token file. PERMISSION_DENIED as ReadPrivateFile says for
// kOthersMustNotRead.
absl::StatusOr<std::string> ReadTokenFile(const std::string& path);

}  // namespace lossd::client

#endif  // LOSSD_CLIENT_CPP_CONTEXTS_H_
