// SPDX-License-Identifier: Apache-2.0
// Named servers: the file in which a person keeps the addresses, certificates and token files of the servers
// that they use; and which server a program means (ChooseServer). tests/client/cpp/contexts.json has cases.
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
// which nobody else may read. This header also has the functions that read and replace such private files.
//
// Functions are stateless and thread-safe; FolderLock keeps other programs out. Errors name the file and the
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

// What the caller of a program says of the server. Nullopt: the caller does not say, so the environment or a
// context decides. An empty ca, cert, key or token: the caller wants none, whatever those two have.
struct ServerArguments {
  std::optional<std::string> server;
  std::optional<std::string> context;  // the name of one in the file
  std::optional<std::string> ca, cert, key;
  std::optional<std::string> token;
};

struct ChosenServer {
  std::string server;  // a gRPC target name, not checked unless the environment names it
  CredentialOptions credentials;
  std::string context;  // the name of the context that has named it; empty: there is none
  std::string http;     // the HTTP address that this context has, or empty
};

enum class CurrentContext { kCounts, kIsIgnored };

// The server is, in this order: arguments.server, that of arguments.context, LOSSD_SERVER, that of the
// context LOSSD_CONTEXT, that of the file's current context if it counts, 127.0.0.1:7070. Certificates and
// the token come from arguments or the environment, and else from the context that named the server: they are
// never shown to another one. A certificate and its key are a pair, which comes from one place.
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

// Replaces the file, or makes it, with mode 0600; readers see the old or the new content. A link is followed.
absl::Status WritePrivateFile(const std::string& path, const std::string& content);

// The lock of a folder. While a lock lives, other programs that ask for the lock of the same folder wait.
// FolderLock::Of makes the folder, with mode 0700, if it is not there. Move-only.
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

// ---- The file of contexts ----

// One server with a name. Empty: not given.
struct NamedServer {
  std::string server;  // as lossctl's --server takes it; not empty
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

// The path of `file`, which the contexts file at `path` names. A relative `file` is in the folder of `path`.
std::string PathBeside(const std::string& path, const std::string& file);

// The token in a file: its one line. PERMISSION_DENIED unless only the owner may read it, who is the user or
// root; or, if it belongs to root, a group.
absl::StatusOr<std::string> ReadTokenFile(const std::string& path);

}  // namespace lossd::client

#endif  // LOSSD_CLIENT_CPP_CONTEXTS_H_
