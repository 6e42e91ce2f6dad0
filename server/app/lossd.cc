// SPDX-License-Identifier: Apache-2.0
// The functions of the library liblossd (lossd.h): servers, or ranks of servers, in the calling process.
#include "server/app/lossd.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/status_macros.h"
#include "server/app/process.h"
#include "server/app/server.h"
#include "server/app/server_options.h"
#include "server/app/server_parts.h"
#include "server/log/log.h"
#include "server/ranks/start.h"

namespace lossd::app {
namespace {

// A Unix socket's path has at most 107 characters. The names in the folder take 22 of them.
constexpr size_t kLongestFolder = 85;

// A folder for the server's sockets, which only this user can enter. The destructor removes the folder.
class PrivateFolder {
 public:
  static absl::StatusOr<std::unique_ptr<PrivateFolder>> Make() {
    const char* const given = std::getenv("TMPDIR");
    std::error_code ignored;
    std::string base =
        given == nullptr || *given == '\0' ? "/tmp" : std::filesystem::absolute(given, ignored).string();
    if (base.size() > kLongestFolder) base = "/tmp";
    std::string path = base + "/lossd-XXXXXX";
    if (mkdtemp(path.data()) == nullptr) {
      return absl::UnavailableError(absl::StrCat("cannot make a folder ", path, " for the server's socket: ",
                                                 strerror(errno), "; TMPDIR or the option listen say where"));
    }
    return std::unique_ptr<PrivateFolder>(new PrivateFolder(std::move(path)));
  }
  ~PrivateFolder() {
    std::error_code ignored;  // if the removal fails, the folder remains
    std::filesystem::remove_all(path_, ignored);
  }
  PrivateFolder(const PrivateFolder&) = delete;
  PrivateFolder& operator=(const PrivateFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  explicit PrivateFolder(std::string path) : path_(std::move(path)) {}

  const std::string path_;
};

// The state of a server, for threads that wait for its end. The server's threads set it. It outlives the
// server.
class State {
 public:
  // Sets the state when the server ends. Only the first call counts, because later calls are consequences of
  // that end.
  void Set(lossd_state state, absl::Status why = absl::OkStatus()) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    if (state_ == LOSSD_SERVES) {
      state_ = state;
      why_ = std::move(why);
    }
    joined_.Notify();
  }
  void SetJoined() { joined_.Notify(); }
  lossd_state Get() const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return state_;
  }
  // The error with which the ranks ended; OK if they ended without one.
  absl::Status Why() const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return why_;
  }
  // Waits until the server does not serve any more, or for `limit`, and returns the state.
  lossd_state Await(absl::Duration limit) const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    const auto ended = [this] {
      mutex_.AssertReaderHeld();
      return state_ != LOSSD_SERVES;
    };
    clocks::AwaitFor(mutex_, absl::Condition(&ended), limit);
    return state_;
  }
  // Waits until the ranks have joined rank 0, or have ended.
  void AwaitJoined() const { joined_.AwaitFor(absl::InfiniteDuration()); }

 private:
  mutable absl::Mutex mutex_;
  lossd_state state_ ABSL_GUARDED_BY(mutex_) = LOSSD_SERVES;
  absl::Status why_ ABSL_GUARDED_BY(mutex_);
  clocks::Event joined_;
};

// The options of the server, and the log level of its process.
struct Options {
  ServerOptions server;
  ranks::LaunchFlags launch;
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

absl::StatusOr<int> ParseNumber(absl::string_view name, absl::string_view text) {
  int number = 0;
  if (absl::SimpleAtoi(text, &number)) return number;
  return absl::InvalidArgumentError(absl::StrCat(name, " is \"", text, "\"; it must be a number"));
}

// Makes the paths absolute, because the process may change its working directory while the server runs.
void MakeAbsolute(ServerOptions* options) {
  SecurityOptions& security = options->security;
  for (std::string* path : {&options->checkpoint_directory, &security.tls_cert, &security.tls_key,
                            &security.tls_client_ca, &security.role_file, &security.token_file}) {
    std::error_code error;
    const std::filesystem::path absolute = std::filesystem::absolute(*path, error);
    if (!path->empty() && !error) *path = absolute.string();
  }
}

absl::StatusOr<Options> ReadOptions(const char* const* texts) {
  Options options;
  std::optional<int> local_rank;
  options.server.version = LOSSD_VERSION;
  options.server.embedded = true;
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
    } else if (name == "rank" || name == "ranks") {
      LOSSD_TRY((name == "rank" ? options.launch.rank : options.launch.ranks), ParseNumber(name, value));
    } else if (name == "leader") {
      options.launch.leader = std::string(value);
    } else if (name == "local_rank") {
      LOSSD_TRY(local_rank, ParseNumber(name, value));
    } else if (name == "worker_http") {
      return absl::InvalidArgumentError("worker_http is an option of the program alone");
    } else {
      LOSSD_RETURN_IF_ERROR(SetOption(name, value, &options.server));
      if (name == "listen") options.listens_in_a_folder = false;
    }
  }
  LOSSD_TRY(options.server.ranks.launch, ranks::ReadLaunch(options.launch, {}));
  options.server.ranks.launch.local_rank = local_rank;
  MakeAbsolute(&options.server);
  return options;
}

// Runs `body` on a thread of its own and waits for it. So CUDA's state of the calling thread, such as its
// current GPU, does not change. Returns false in two cases: `body` has not ended within `limit`, and
// continues without the caller; or the system cannot start a thread, and `body` does not run.
bool RunApart(absl::Duration limit, absl::AnyInvocable<void()> body) {
  const auto ended = std::make_shared<clocks::Event>();
  try {
    std::thread([ended, body = std::move(body)]() mutable {
      body();
      ended->Notify();
    }).detach();
  } catch (const std::system_error&) {
    return false;
  }
  return ended->AwaitFor(limit);
}

// A drain may take this long beyond its limit before the device counts as lost.
constexpr absl::Duration kPatience = absl::Minutes(1);

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

using lossd::app::LocalRanks;
using lossd::app::Options;
using lossd::app::PrivateFolder;
using lossd::app::Server;
using lossd::app::ServerOptions;
using lossd::app::State;

// A server, or the ranks of this process that compute for rank 0 in another process. Thread-safe.
struct lossd_server {
 public:
  static absl::StatusOr<std::unique_ptr<lossd_server>> Start(const char* const* texts);

  const std::string& address() const { return address_; }
  const std::string& http_address() const { return http_address_; }
  lossd_state Await(absl::Duration limit) const { return state_->Await(limit); }
  absl::Status Live() ABSL_LOCKS_EXCLUDED(mutex_);
  // Drains. Returns whether no call had to be cancelled. If there are several ranks, all of them end.
  bool Drain(absl::Duration limit) ABSL_LOCKS_EXCLUDED(mutex_);
  // Frees the resources of the server, and returns whether that was possible. If it was not, the object must
  // never be destroyed.
  bool Stop() ABSL_LOCKS_EXCLUDED(mutex_);
  // The most time that a drain with this limit takes, unless a device hangs.
  absl::Duration MostOf(absl::Duration limit) const {
    return limit + options_.drain_timeout + lossd::app::kWorkerGrace + lossd::app::kPatience;
  }
  // Call when a drain does not end.
  void GiveUp() {
    given_up_ = true;
    state_->Set(LOSSD_DEVICE_LOST, absl::UnavailableError("the drain does not end: the device hangs"));
  }
  bool given_up() const { return given_up_; }

 private:
  explicit lossd_server(ServerOptions options) : options_(std::move(options)) {}
  absl::Status StartServer() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status StartRanks() ABSL_LOCKS_EXCLUDED(mutex_);
  void OnLeaving() ABSL_LOCKS_EXCLUDED(mutex_);
  // The server or the ranks; null if there is none, or after Stop.
  std::shared_ptr<Server> server() ABSL_LOCKS_EXCLUDED(mutex_);
  std::shared_ptr<LocalRanks> ranks() ABSL_LOCKS_EXCLUDED(mutex_);

  ServerOptions options_;
  std::unique_ptr<PrivateFolder> folder_;  // null: the option `listen` names an address
  const std::shared_ptr<State> state_ = std::make_shared<State>();
  std::string address_;
  std::string http_address_;
  std::atomic<bool> given_up_{false};
  absl::Mutex mutex_;
  std::shared_ptr<Server> server_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<LocalRanks> ranks_ ABSL_GUARDED_BY(mutex_);
  std::thread leaver_ ABSL_GUARDED_BY(mutex_);  // drains when another rank leaves
};

absl::StatusOr<std::unique_ptr<lossd_server>> lossd_server::Start(const char* const* texts) {
  LOSSD_TRY(Options options, lossd::app::ReadOptions(texts));
  lossd::log::Configure(options.level, options.format);
  auto started = absl::WrapUnique(new lossd_server(std::move(options.server)));
  absl::Status status;
  if (started->options_.ranks.launch.rank != 0) {
    status = started->StartRanks();
  } else {
    if (options.listens_in_a_folder) {
      LOSSD_TRY(started->folder_, PrivateFolder::Make());
      started->options_.listen = absl::StrCat("unix:", started->folder_->path(), "/grpc");
    }
    status = started->StartServer();
  }
  if (status.ok()) return started;
  if (!started->Stop()) (void)started.release();
  return status;
}

absl::Status lossd_server::StartServer() {
  options_.on_device_lost = [state = state_](const absl::Status& why) { state->Set(LOSSD_DEVICE_LOST, why); };
  options_.ranks.on_leaving = [this] { OnLeaving(); };
  LOSSD_TRY(std::shared_ptr<Server> server, Server::Start(options_));
  address_ = server->grpc_address();
  http_address_ = server->http_address();
  absl::MutexLock lock(&mutex_);
  if (leaver_.joinable()) return absl::UnavailableError("another rank has left before this one had started");
  server_ = std::move(server);
  return absl::OkStatus();
}

// Called on a thread of the server. The end of the server waits for that thread, so the drain runs on a
// thread of its own.
void lossd_server::OnLeaving() {
  absl::MutexLock lock(&mutex_);
  if (!leaver_.joinable()) leaver_ = std::thread([this] { Drain(options_.drain_timeout); });
}

absl::Status lossd_server::StartRanks() {
  LOSSD_RETURN_IF_ERROR(lossd::app::CheckOptions(options_));
  LOSSD_TRY(std::shared_ptr<LocalRanks> ranks,
            LocalRanks::StartOfProcess(
                options_, [state = state_](const std::string&) { state->SetJoined(); },
                [state = state_](const lossd::app::RanksEnd& end) {
                  const bool lost = !end.status.ok() && end.joined;
                  state->Set(lost ? LOSSD_DEVICE_LOST : LOSSD_DRAINED, end.status);
                }));
  {
    absl::MutexLock lock(&mutex_);
    ranks_ = std::move(ranks);
  }
  state_->AwaitJoined();
  if (state_->Get() == LOSSD_SERVES || !state_->Why().ok()) return state_->Why();
  return absl::UnavailableError("rank 0 has ended");
}

std::shared_ptr<Server> lossd_server::server() {
  absl::MutexLock lock(&mutex_);
  return server_;
}

std::shared_ptr<LocalRanks> lossd_server::ranks() {
  absl::MutexLock lock(&mutex_);
  return ranks_;
}

absl::Status lossd_server::Live() {
  if (!state_->Why().ok()) return state_->Why();
  if (const std::shared_ptr<Server> served = server()) return served->Live();
  const std::shared_ptr<LocalRanks> computing = ranks();
  if (computing == nullptr) return absl::OkStatus();
  return lossd::app::Live({.device_lost = computing->device_lost(), .device_silence = computing->Silence()},
                          options_.liveness_timeout);
}

bool lossd_server::Drain(absl::Duration limit) {
  bool clean = true;
  if (const std::shared_ptr<LocalRanks> computing = ranks()) {
    // This rank asks rank 0, which drains and ends all ranks.
    if (state_->Get() == LOSSD_SERVES) computing->Leave("a request to stop");
    state_->Await(limit + options_.drain_timeout + lossd::app::kWorkerGrace);
  }
  if (std::shared_ptr<Server> served = server()) {
    clean = served->Drain(lossd::clocks::SteadyNow() + limit);
    // Destroy the server, which ends the ranks. After the loss of a device this is not done, because it could
    // hang.
    if (options_.ranks.several() && state_->Get() != LOSSD_DEVICE_LOST) {
      absl::MutexLock lock(&mutex_);
      server_ = nullptr;
    }
  }
  state_->Set(LOSSD_DRAINED);
  return clean;
}

bool lossd_server::Stop() {
  Drain(absl::ZeroDuration());
  std::thread leaver;
  {
    absl::MutexLock lock(&mutex_);
    leaver = std::move(leaver_);
  }
  if (leaver.joinable()) leaver.join();
  if (state_->Get() == LOSSD_DEVICE_LOST) {
    folder_ = nullptr;
    return false;
  }
  // Both are destroyed without the mutex, because their threads may wait for it.
  std::shared_ptr<Server> served;
  std::shared_ptr<LocalRanks> computing;
  absl::MutexLock lock(&mutex_);
  served.swap(server_);
  computing.swap(ranks_);
  return true;
}

const char* lossd_version() { return LOSSD_VERSION; }

lossd_server* lossd_start(const char* const* options, int* code, char** error) {
  lossd::clocks::TakeLocksWithoutSearch();
  absl::StatusOr<std::unique_ptr<lossd_server>> started =
      absl::ResourceExhaustedError("the system has no thread for the server");
  lossd::app::RunApart(absl::InfiniteDuration(), [&] { started = lossd_server::Start(options); });
  if (started.ok()) return started->release();
  if (code != nullptr) *code = static_cast<int>(started.status().code());
  if (error != nullptr) *error = lossd::app::CopyOf(started.status().message());
  return nullptr;
}

const char* lossd_address(const lossd_server* server) { return server->address().c_str(); }

const char* lossd_http_address(const lossd_server* server) { return server->http_address().c_str(); }

lossd_state lossd_wait(lossd_server* server, double seconds) {
  return server->Await(seconds < 0 ? absl::InfiniteDuration() : absl::Seconds(seconds));
}

int lossd_live(lossd_server* server, char** why) {
  const absl::Status status = server->Live();
  if (status.ok()) return 1;
  if (why != nullptr) *why = lossd::app::CopyOf(status.message());
  return 0;
}

int lossd_drain(lossd_server* server, double seconds) {
  const auto clean = std::make_shared<std::atomic<bool>>(false);
  const absl::Duration limit = absl::Seconds(std::max(0.0, seconds));
  const bool ended =
      lossd::app::RunApart(server->MostOf(limit), [server, limit, clean] { *clean = server->Drain(limit); });
  if (!ended) server->GiveUp();
  return ended && *clean ? 1 : 0;
}

void lossd_stop(lossd_server* server) {
  if (server == nullptr || server->given_up()) return;
  lossd::app::RunApart(server->MostOf(absl::ZeroDuration()), [server] {
    if (server->Stop()) delete server;
  });
}

void lossd_free(char* text) { std::free(text); }
