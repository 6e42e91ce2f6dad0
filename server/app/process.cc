// SPDX-License-Identifier: Apache-2.0
// Settings and events of the process of a server (process.h): memory, signals, and the service manager.
#include "server/app/process.h"

#include <errno.h>
#include <fcntl.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/impl/server_builder_option.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "kernels/device_choice.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"
#include "server/log/log.h"

namespace lossd::app {

namespace {

// Raises the limit of open files as far as the system allows, but at most to kEnough, which is enough for all
// connections together. The connections alone could use up the usual limit of shells and service managers,
// 1,024.
void RaiseDescriptorLimit() {
  constexpr rlim_t kEnough = 65'536;
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= kEnough) return;
  limit.rlim_cur = std::min(kEnough, limit.rlim_max);
  setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace

void PrepareProcess() {
  RaiseDescriptorLimit();
  BoundFreedMemory();
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);  // a write beyond the limit of file sizes fails instead of ending the server
  kernels::SetNcclDefaults();
}

namespace {

constexpr int kArenas = 8;
constexpr int kMappedBytes = 8 << 20;
constexpr int kKeptBytes = 8 << 20;  // free bytes kept at the end of each arena
constexpr size_t kFreeBytes = 16 << 20;

}  // namespace

void BoundFreedMemory() {
  mallopt(M_ARENA_MAX, kArenas);
  // Setting either of these also turns off the adaptation to the sizes of freed blocks.
  mallopt(M_MMAP_THRESHOLD, kMappedBytes);
  mallopt(M_TRIM_THRESHOLD, kKeptBytes);
}

void GiveBackFreedMemory() {
  if (mallinfo2().fordblks > kFreeBytes) malloc_trim(/*pad=*/0);
}

void EndWithin(absl::Duration limit, int status, std::string what) {
  std::thread([limit, status, what = std::move(what)] {
    std::this_thread::sleep_for(absl::ToChronoNanoseconds(limit));
    log::Log(log::LogLevel::kError, absl::StrCat(what, " does not end: leaving at once"),
             {{"status", status}});
    _exit(status);
  }).detach();
}

namespace {

// If the library of the reflection service is linked, it registers itself and adds the service to every
// server. This option first removes that service.
class Reflection final : public grpc::ServerBuilderOption {
 public:
  explicit Reflection(bool wanted) : wanted_(wanted) {}
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    auto reflection = std::make_unique<grpc::reflection::ProtoServerReflectionPlugin>();
    const std::string name = reflection->name();
    std::erase_if(*plugins, [&](const auto& plugin) { return plugin->name() == name; });
    if (wanted_) plugins->push_back(std::move(reflection));
  }

 private:
  const bool wanted_;
};

}  // namespace

void SetReflection(bool wanted, grpc::ServerBuilder* builder) {
  builder->SetOption(std::make_unique<Reflection>(wanted));
}

namespace {

constexpr int kSignals[] = {SIGTERM, SIGINT};
constexpr unsigned char kEnd = 0;  // written to the pipe in place of a signal

// The write end of the pipe. It is never closed, because a handler may be running.
volatile sig_atomic_t g_to_reader = -1;

void Write(unsigned char what) {
  const int saved = errno;
  while (write(g_to_reader, &what, 1) < 0 && errno == EINTR) {
  }
  errno = saved;
}

void Handle(int signal) { Write(static_cast<unsigned char>(signal)); }

void Install(void (*handler)(int)) {
  struct sigaction action = {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  for (const int signal : kSignals) sigaction(signal, &action, nullptr);
}

sigset_t Signals() {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : kSignals) sigaddset(&signals, signal);
  return signals;
}

}  // namespace

StopEvents::StopEvents() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    std::perror("pipe2");
    std::abort();
  }
  pipe_ = ends[0];
  g_to_reader = ends[1];
  Install(&Handle);
  reader_ = std::thread([this] {
    const sigset_t signals = Signals();
    pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
    Read();
  });
  const sigset_t signals = Signals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
}

StopEvents::~StopEvents() {
  Install(SIG_IGN);
  Write(kEnd);
  reader_.join();
  close(pipe_);
}

void StopEvents::Read() {
  unsigned char what = kEnd;
  while (true) {
    const ssize_t bytes = read(pipe_, &what, 1);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes != 1 || what == kEnd) return;
    Push({.signal = what});
  }
}

void StopEvents::Push(Event event) {
  constexpr size_t kMost = 16;  // further events add nothing
  absl::MutexLock lock(&mutex_);
  if (events_.size() < kMost) events_.push_back(event);
}

void StopEvents::NotifyStop() { Push({.signal = SIGTERM, .of_rank = true}); }

int StopEvents::FirstSignal() const {
  for (const Event& event : events_) {
    if (event.signal != 0 && !event.of_rank) return event.signal;
  }
  return 0;
}

int StopEvents::Pending() const {
  absl::ReaderMutexLock lock(&mutex_);
  return FirstSignal();
}

int StopEvents::AwaitPending(absl::Duration limit) const {
  absl::ReaderMutexLock lock(&mutex_);
  const auto pending = [this] {
    mutex_.AssertReaderHeld();
    return FirstSignal() != 0;
  };
  clocks::AwaitFor(mutex_, absl::Condition(&pending), limit);
  return FirstSignal();
}

StopEvents::Event StopEvents::Wait() {
  absl::MutexLock lock(&mutex_);
  const auto has_event = [this] {
    mutex_.AssertHeld();
    return !events_.empty();
  };
  mutex_.Await(absl::Condition(&has_event));
  const Event event = events_.front();
  events_.pop_front();
  return event;
}

int StopEvents::WaitForSignal() {
  while (true) {
    const Event event = Wait();
    if (event.signal != 0 && !event.of_rank) return event.signal;
  }
}

namespace {

// A start may continue for this long after a signal, to stop by itself, or to end so that the server is
// drained. This is shorter than the time that launchers wait before they kill a process.
constexpr absl::Duration kStartGrace = absl::Seconds(10);
constexpr int kExitFailure = 1;

}  // namespace

StartWatch::StartWatch(const StopEvents* events) : events_(events), thread_([this] { Watch(); }) {}

StartWatch::~StartWatch() {
  started_.Notify();
  thread_.join();
}

void StartWatch::Watch() {
  int signal = 0;
  while (signal == 0) {
    if (started_.happened()) return;
    signal = events_->AwaitPending(kSignalPoll);
  }
  log::Log(log::LogLevel::kInfo, "asked to stop before serving", {{"reason", strsignal(signal)}});
  if (started_.AwaitFor(kStartGrace)) return;
  log::Log(log::LogLevel::kError, "the start does not end: leaving at once",
           {{"waited", absl::FormatDuration(kStartGrace)}});
  _exit(kExitFailure);
}

namespace {

// A thread waits at most this long for a service manager that does not read.
constexpr time_t kSendSeconds = 5;
// The least pause between two reports, even if the watchdog's time is short.
constexpr absl::Duration kLeastPause = absl::Milliseconds(10);

absl::string_view Variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

absl::Status CheckAddress(absl::string_view address) {
  const bool path_or_name = address.size() > 1 && (address[0] == '/' || address[0] == '@');
  if (path_or_name && address.size() < sizeof(sockaddr_un::sun_path)) return absl::OkStatus();
  return errors::FieldError("NOTIFY_SOCKET",
                            absl::StrCat("be a path that begins with / or @ and a name, of less than ",
                                         sizeof(sockaddr_un::sun_path), " bytes"),
                            address);
}

absl::StatusOr<absl::Duration> WatchdogOfThisProcess() {
  const absl::string_view time = Variable("WATCHDOG_USEC");
  if (time.empty()) return absl::InfiniteDuration();
  int64_t microseconds = 0;
  if (!absl::SimpleAtoi(time, &microseconds) || microseconds <= 0)
    return errors::FieldError("WATCHDOG_USEC", "be a number of microseconds above 0", time);
  const absl::string_view process = Variable("WATCHDOG_PID");
  int64_t id = getpid();
  if (!process.empty() && !absl::SimpleAtoi(process, &id))
    return errors::FieldError("WATCHDOG_PID", "be the id of a process", process);
  return id == getpid() ? absl::Microseconds(microseconds) : absl::InfiniteDuration();
}

// The status as one line of a message.
std::string StatusLine(absl::string_view text) {
  return absl::StrCat("STATUS=", absl::StrReplaceAll(text, {{"\n", " "}}), "\n");
}

int SendTo(const std::string& address, const std::string& message) {
  const int descriptor = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (descriptor < 0) return errno;
  const timeval limit = {.tv_sec = kSendSeconds, .tv_usec = 0};
  setsockopt(descriptor, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
  sockaddr_un to = {};
  to.sun_family = AF_UNIX;
  std::copy(address.begin(), address.end(), to.sun_path);
  if (address[0] == '@') to.sun_path[0] = '\0';
  // A name in the abstract namespace has no zero at its end.
  const auto bytes =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + address.size() + (address[0] == '/' ? 1 : 0));
  ssize_t sent = -1;
  do {
    sent = sendto(descriptor, message.data(), message.size(), MSG_NOSIGNAL,
                  reinterpret_cast<const sockaddr*>(&to), bytes);
  } while (sent < 0 && errno == EINTR);
  const int error = sent < 0 ? errno : 0;
  close(descriptor);
  return error;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ServiceManager>> ServiceManager::FromEnvironment() {
  const absl::string_view address = Variable("NOTIFY_SOCKET");
  if (address.empty())
    return std::unique_ptr<ServiceManager>(new ServiceManager("", absl::InfiniteDuration()));
  LOSSD_RETURN_IF_ERROR(CheckAddress(address));
  LOSSD_TRY(const absl::Duration watchdog, WatchdogOfThisProcess());
  return std::unique_ptr<ServiceManager>(new ServiceManager(std::string(address), watchdog));
}

void ServiceManager::Ready(const std::string& status) {
  absl::MutexLock lock(&mutex_);
  status_ = status;
  Send(absl::StrCat("READY=1\n", StatusLine(status)));
}

void ServiceManager::Stopping(const std::string& status, absl::Duration limit) {
  absl::MutexLock lock(&mutex_);
  status_ = status;
  Send(absl::StrCat("STOPPING=1\n", StatusLine(status),
                    "EXTEND_TIMEOUT_USEC=", absl::ToInt64Microseconds(limit), "\n"));
}

void ServiceManager::Alive() {
  absl::MutexLock lock(&mutex_);
  Send(absl::StrCat("WATCHDOG=1\n", StatusLine(status_)));
}

void ServiceManager::NotAlive(absl::string_view why) { Send(StatusLine(absl::StrCat("not alive: ", why))); }

void ServiceManager::Send(const std::string& message) {
  if (address_.empty()) return;
  const int error = SendTo(address_, message);
  if (error == 0 || failed_.exchange(true)) return;
  log::Log(log::LogLevel::kWarning, "the service manager cannot be told",
           {{"NOTIFY_SOCKET", address_}, {"error", strerror(error)}});
}

KeepAlive::KeepAlive(ServiceManager* manager, absl::AnyInvocable<absl::Status()> live) {
  if (manager->watchdog() == absl::InfiniteDuration()) return;
  thread_.emplace(std::max(manager->watchdog() / 2, kLeastPause),
                  [manager, live = std::move(live)]() mutable {
                    const absl::Status alive = live();
                    alive.ok() ? manager->Alive() : manager->NotAlive(alive.message());
                  });
}

}  // namespace lossd::app
