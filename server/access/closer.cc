// SPDX-License-Identifier: Apache-2.0
#include "server/access/closer.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <deque>
#include <utility>

namespace lossd::access {
namespace {

constexpr int kInterrupt = SIGURG;  // ignored by default, so a late signal does no harm
constexpr long kPatienceNanoseconds = 10'000'000;
constexpr size_t kMostThreads = 16;
constexpr size_t kMostWaiting = 256;

void Ignore(int) {}

// A timer that sends signals to the thread that made it, which interrupt the thread's waits.
class Alarm {
 public:
  Alarm() {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, kInterrupt);
    pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
    sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = kInterrupt;
    event._sigev_un._tid = static_cast<pid_t>(syscall(SYS_gettid));
    is_set_ = timer_create(CLOCK_MONOTONIC, &event, &timer_) == 0;
  }
  // Starts the timer, with a signal every 10 ms, or stops it.
  void Ring(bool on) {
    if (!is_set_) return;
    const timespec patience = {.tv_sec = 0, .tv_nsec = on ? kPatienceNanoseconds : 0};
    const itimerspec times = {.it_interval = patience, .it_value = patience};
    timer_settime(timer_, 0, &times, nullptr);
  }

 private:
  timer_t timer_ = {};
  bool is_set_ = false;
};

class Closer {
 public:
  Closer() {
    struct sigaction action = {};
    if (sigaction(kInterrupt, nullptr, &action) == 0 && action.sa_handler != SIG_DFL &&
        action.sa_handler != SIG_IGN)
      return;  // the process has a handler, which interrupts waits too
    action = {};
    action.sa_handler = &Ignore;  // without SA_RESTART, so that waits end
    sigaction(kInterrupt, &action, nullptr);
  }

  void Take(wire::OwnedDescriptor descriptor) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    waiting_.push_back(std::move(descriptor));
    if (idle_ >= waiting_.size() || threads_ == kMostThreads) return;
    ++threads_;
    std::thread([this] { Run(); }).detach();
  }
  bool behind() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return waiting_.size() > kMostWaiting;
  }
  size_t open() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return waiting_.size() + threads_ - idle_;
  }

 private:
  wire::OwnedDescriptor Next() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    const auto has_work = [this] {
      mutex_.AssertHeld();
      return !waiting_.empty();
    };
    ++idle_;
    mutex_.Await(absl::Condition(&has_work));
    --idle_;
    wire::OwnedDescriptor next = std::move(waiting_.front());
    waiting_.pop_front();
    return next;
  }

  [[noreturn]] void Run() {
    Alarm alarm;
    while (true) {
      wire::OwnedDescriptor descriptor = Next();
      const linger none = {.l_onoff = 0, .l_linger = 0};  // without SO_LINGER, close mostly does not wait
      setsockopt(descriptor.get(), SOL_SOCKET, SO_LINGER, &none, sizeof(none));
      alarm.Ring(true);
      descriptor = wire::OwnedDescriptor();
      alarm.Ring(false);
    }
  }

  absl::Mutex mutex_;
  std::deque<wire::OwnedDescriptor> waiting_ ABSL_GUARDED_BY(mutex_);
  size_t threads_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t idle_ ABSL_GUARDED_BY(mutex_) = 0;
};

// The closer of the process. Never destroyed, because its threads may wait forever.
Closer& TheCloser() {
  static Closer& closer = *new Closer();
  return closer;
}

}  // namespace

void CloseElsewhere(wire::OwnedDescriptor descriptor) {
  if (descriptor) TheCloser().Take(std::move(descriptor));
}

void CloseElsewhere(std::vector<wire::OwnedDescriptor> descriptors) {
  for (wire::OwnedDescriptor& descriptor : descriptors) CloseElsewhere(std::move(descriptor));
}

bool ClosingIsBehind() { return TheCloser().behind(); }

size_t BeingClosed() { return TheCloser().open(); }

namespace {

constexpr size_t kRoom = size_t{64} << 10;  // bytes under way in one direction
constexpr int kLookAgain = 20;              // milliseconds between checks while closing is behind

bool WouldWait() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

}  // namespace

Relay::Relay() : wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), thread_([this] { Run(); }) {}

Relay::~Relay() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  eventfd_write(wake_.get(), 1);
  thread_.join();
  for (auto* pairs : {&pairs_, &new_}) {
    for (const auto& pair : *pairs) CloseElsewhere(std::move(pair->stranger));
  }
}

wire::OwnedDescriptor Relay::Stand(wire::OwnedDescriptor stranger) {
  int ends[2] = {-1, -1};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0) {
    CloseElsewhere(std::move(stranger));
    return {};
  }
  auto pair = std::make_unique<Pair>();
  pair->stranger = std::move(stranger);
  pair->reader = wire::OwnedDescriptor(ends[0]);
  absl::MutexLock lock(&mutex_);
  new_.push_back(std::move(pair));
  eventfd_write(wake_.get(), 1);
  return wire::OwnedDescriptor(ends[1]);
}

void Relay::Run() {
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      if (stopping_) return;
      pairs_.splice(pairs_.end(), new_);
    }
    const bool behind = ClosingIsBehind();
    std::vector<pollfd> ready = {{.fd = wake_.get(), .events = POLLIN}};
    const auto add = [&ready](int descriptor, bool reads, bool writes) {
      const int events = (reads ? POLLIN : 0) | (writes ? POLLOUT : 0);
      ready.push_back({.fd = events == 0 ? -1 : descriptor, .events = static_cast<int16_t>(events)});
    };
    for (const auto& pair : pairs_) {
      add(pair->stranger.get(), !pair->ended && !behind && pair->to_reader.empty(),
          !pair->to_stranger.empty());
      add(pair->reader.get(), !pair->ended && pair->to_stranger.empty(), !pair->to_reader.empty());
    }
    if (poll(ready.data(), ready.size(), behind ? kLookAgain : -1) < 0) continue;
    eventfd_t ignored = 0;
    if (ready[0].revents != 0) eventfd_read(wake_.get(), &ignored);
    size_t index = 1;
    for (auto pair = pairs_.begin(); pair != pairs_.end(); index += 2) {
      const auto current = pair++;
      if (Serve(current->get(), ready[index].revents, ready[index + 1].revents)) continue;
      CloseElsewhere(std::move((*current)->stranger));
      pairs_.erase(current);
    }
  }
}

namespace {

// Writes as many bytes as it can without waiting. False: the other end is closed.
bool Flush(int to, const std::string& bytes, size_t* sent) {
  while (*sent < bytes.size()) {
    const ssize_t part = send(to, bytes.data() + *sent, bytes.size() - *sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (part < 0) return WouldWait();
    *sent += static_cast<size_t>(part);
  }
  return true;
}

}  // namespace

bool Relay::ReadStranger(Pair* pair) {
  pair->to_reader.bytes.resize(kRoom);
  pair->to_reader.sent = 0;
  iovec data = {.iov_base = pair->to_reader.bytes.data(), .iov_len = kRoom};
  alignas(cmsghdr) char control[CMSG_SPACE(wire::kMaxDescriptors * sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t received = recvmsg(pair->stranger.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  pair->to_reader.bytes.resize(received > 0 ? static_cast<size_t>(received) : 0);
  if (received < 0) return WouldWait();
  std::vector<wire::OwnedDescriptor> descriptors = wire::DescriptorsOf(&message);
  const bool brings = !descriptors.empty() || (message.msg_flags & MSG_CTRUNC) != 0;
  CloseElsewhere(std::move(descriptors));
  if (received == 0) pair->ended = true;
  return !brings;
}

bool Relay::ReadReader(Pair* pair) {
  pair->to_stranger.bytes.resize(kRoom);
  pair->to_stranger.sent = 0;
  const ssize_t received = recv(pair->reader.get(), pair->to_stranger.bytes.data(), kRoom, MSG_DONTWAIT);
  pair->to_stranger.bytes.resize(received > 0 ? static_cast<size_t>(received) : 0);
  if (received < 0) return WouldWait();
  if (received == 0) pair->ended = true;
  return true;
}

bool Relay::Serve(Pair* pair, int stranger_events, int reader_events) {
  if (((stranger_events | reader_events) & (POLLERR | POLLNVAL)) != 0) return false;
  const bool reads_stranger = !pair->ended && pair->to_reader.empty();
  const bool reads_reader = !pair->ended && pair->to_stranger.empty();
  if (reads_stranger && (stranger_events & (POLLIN | POLLHUP)) != 0 && !ReadStranger(pair)) return false;
  if (reads_reader && (reader_events & (POLLIN | POLLHUP)) != 0 && !ReadReader(pair)) return false;
  if (!Flush(pair->reader.get(), pair->to_reader.bytes, &pair->to_reader.sent)) return false;
  if (!Flush(pair->stranger.get(), pair->to_stranger.bytes, &pair->to_stranger.sent)) return false;
  return !pair->ended || !pair->to_reader.empty() || !pair->to_stranger.empty();
}

}  // namespace lossd::access
