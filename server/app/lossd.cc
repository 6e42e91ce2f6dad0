// SPDX-License-Identifier: Apache-2.0
#include "server/app/lossd.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/status_macros.h"
#include "server/app/server.h"
#include "server/app/server_options.h"
#include "server/log/log.h"

namespace lossd::app {
namespace {

// A folder that only this user can enter, for the server's sockets. The folder goes with the object.
class PrivateFolder {
 public:
  static absl::StatusOr<std::unique_ptr<PrivateFolder>> Make() {
    const char* const base = std::getenv("TMPDIR");
    std::string path =
        absl::StrCat(base != nullptr && *base != '\0' ? absl::string_view(base) : "/tmp", "/lossd-XXXXXX");
    if (mkdtemp(path.data()) == nullptr) {
      return absl::UnavailableError(absl::StrCat("cannot make a folder ", path, " for the server's socket: ",
                                                 strerror(errno), "; TMPDIR or the option listen say where"));
    }
    return std::unique_ptr<PrivateFolder>(new PrivateFolder(std::move(path)));
  }
  ~PrivateFolder() {
    std::error_code ignored;  // there is nothing to do about a folder that stays
    std::filesystem::remove_all(path_, ignored);
  }
  PrivateFolder(const PrivateFolder&) = delete;
  PrivateFolder& operator=(const PrivateFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  explicit PrivateFolder(std::string path) : path_(std::move(path)) {}

  const std::string path_;
};

// What a server has become, for those who wait. Outlives the server, whose threads set it.
class State {
 public:
  void Set(lossd_state state) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    if (state_ != LOSSD_DEVICE_LOST) state_ = state;
  }
  lossd_state Get() const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return state_;
  }
  // The state once the server does not serve any more, or after `limit`.
  lossd_state Await(absl::Duration limit) const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    const auto ended = [this] {
      mutex_.AssertReaderHeld();
      return state_ != LOSSD_SERVES;
    };
    clocks::AwaitFor(mutex_, absl::Condition(&ended), limit);
    return state_;
  }

 private:
  mutable absl::Mutex mutex_;
  lossd_state state_ ABSL_GUARDED_BY(mutex_) = LOSSD_SERVES;
};

// The options of the server, and what its process logs.
struct Options {
  ServerOptions server;
  log::LogLevel level = log::LogLevel::kWarning;
  log::LogFormat format = log::LogFormat::kText;
  bool listens_in_a_folder = true;
};

template <typename T>
absl::Status Parse(absl::string_view name, absl::string_view text, T* value) {
  std::string error;
  if (AbslParseFlag(text, value, &error)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, " is \"", text, "\"; it ", error));
}

absl::StatusOr<Options> ReadOptions(const char* const* texts) {
  Options options;
  options.server.version = LOSSD_VERSION;
  options.server.http = "";
  for (; texts != nullptr && *texts != nullptr; ++texts) {
    const absl::string_view text = *texts;
    const size_t equals = text.find('=');
    if (equals == absl::string_view::npos)
      return absl::InvalidArgumentError(absl::StrCat("option \"", text, "\" is not name=text"));
    const absl::string_view name = text.substr(0, equals);
    const absl::string_view value = text.substr(equals + 1);
    if (name == "log_level") {
      LOSSD_RETURN_IF_ERROR(Parse(name, value, &options.level));
    } else if (name == "log_format") {
      LOSSD_RETURN_IF_ERROR(Parse(name, value, &options.format));
    } else {
      LOSSD_RETURN_IF_ERROR(SetOption(name, value, &options.server));
      if (name == "listen") options.listens_in_a_folder = false;
    }
  }
  return options;
}

char* CopyOf(absl::string_view text) {
  char* const copy = static_cast<char*>(std::malloc(text.size() + 1));
  if (copy != nullptr) {
    std::memcpy(copy, text.data(), text.size());
    copy[text.size()] = '\0';
  }
  return copy;
}

}  // namespace
}  // namespace lossd::app

using lossd::app::Options;
using lossd::app::PrivateFolder;
using lossd::app::Server;
using lossd::app::State;

struct lossd_server {
  std::unique_ptr<PrivateFolder> folder;  // null: the option listen says where
  std::shared_ptr<State> state = std::make_shared<State>();
  std::unique_ptr<Server> server;
  std::string address;
  std::string http_address;
};

namespace {

absl::StatusOr<std::unique_ptr<lossd_server>> Start(const char* const* texts) {
  LOSSD_TRY(Options options, lossd::app::ReadOptions(texts));
  lossd::log::Configure(options.level, options.format);
  auto started = std::make_unique<lossd_server>();
  if (options.listens_in_a_folder) {
    LOSSD_TRY(started->folder, PrivateFolder::Make());
    options.server.listen = absl::StrCat("unix:", started->folder->path(), "/grpc");
  }
  options.server.on_device_lost = [state = started->state] { state->Set(LOSSD_DEVICE_LOST); };
  LOSSD_TRY(started->server, Server::Start(options.server));
  started->address = started->server->grpc_address();
  started->http_address = started->server->http_address();
  return started;
}

}  // namespace

const char* lossd_version() { return LOSSD_VERSION; }

lossd_server* lossd_start(const char* const* options, int* code, char** error) {
  absl::StatusOr<std::unique_ptr<lossd_server>> started = Start(options);
  if (started.ok()) return started->release();
  if (code != nullptr) *code = static_cast<int>(started.status().code());
  if (error != nullptr) *error = lossd::app::CopyOf(started.status().message());
  return nullptr;
}

const char* lossd_address(const lossd_server* server) { return server->address.c_str(); }

const char* lossd_http_address(const lossd_server* server) { return server->http_address.c_str(); }

lossd_state lossd_wait(lossd_server* server, double seconds) {
  return server->state->Await(seconds < 0 ? absl::InfiniteDuration() : absl::Seconds(seconds));
}

int lossd_live(const lossd_server* server, char** why) {
  const absl::Status status = server->server->Live();
  if (status.ok()) return 1;
  if (why != nullptr) *why = lossd::app::CopyOf(status.message());
  return 0;
}

int lossd_drain(lossd_server* server, double seconds) {
  const bool clean = server->server->Drain(lossd::clocks::SteadyNow() + absl::Seconds(seconds));
  server->state->Set(LOSSD_DRAINED);
  return clean ? 1 : 0;
}

void lossd_stop(lossd_server* server) {
  if (server == nullptr) return;
  lossd_drain(server, 0);
  // What lies on a lost device could not be given back.
  if (server->state->Get() == LOSSD_DEVICE_LOST) (void)server->server.release();
  delete server;
}

void lossd_free(char* text) { std::free(text); }
