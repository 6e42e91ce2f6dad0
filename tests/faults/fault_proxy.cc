#include "tests/faults/fault_proxy.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/faults/message_boundaries.h"

namespace lossd::test {
namespace {

constexpr int kPollMilliseconds = 20;

int PortOf(const std::string& target) {
  int port = 0;
  EXPECT_TRUE(absl::SimpleAtoi(target.substr(target.rfind(':') + 1), &port)) << target;
  return port;
}

sockaddr_in Loopback(int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  return address;
}

int NewSocket() {
  const int descriptor = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  return descriptor;
}

// A socket that tries a port that no process listens on may be given that very port and reach itself.
bool ReachedItself(int socket) {
  sockaddr_in own = {}, peer = {};
  socklen_t size = sizeof(own);
  getsockname(socket, reinterpret_cast<sockaddr*>(&own), &size);
  size = sizeof(peer);
  getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &size);
  return own.sin_port == peer.sin_port;
}

bool ConnectTo(int socket, int port) {
  const sockaddr_in address = Loopback(port);
  return connect(socket, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 &&
         !ReachedItself(socket);
}

// An HTTP/2 frame RST_STREAM.
std::array<uint8_t, 13> ResetStream(uint32_t stream, uint8_t error) {
  return {0,
          0,
          4,
          3,
          0,
          static_cast<uint8_t>(stream >> 24),
          static_cast<uint8_t>(stream >> 16),
          static_cast<uint8_t>(stream >> 8),
          static_cast<uint8_t>(stream),
          0,
          0,
          0,
          error};
}

bool SendAll(int socket, absl::Span<const uint8_t> data) {
  while (!data.empty()) {
    const ssize_t sent = send(socket, data.data(), data.size(), MSG_NOSIGNAL);
    if (sent <= 0) return false;
    data.remove_prefix(static_cast<size_t>(sent));
  }
  return true;
}

}  // namespace

struct FaultProxy::Connection {
  int sockets[2];                   // by the direction that reads from it: the client's, the server's
  MessageBoundaries boundaries[2];  // by direction
  bool reset = true;                // how it ends
  uint32_t refuse = 0;              // the stream that is to be refused; 0: none
};

// A fault that happens among bytes just received.
struct FaultProxy::Happening {
  Fault fault;
  size_t bytes_before = 0;  // these are forwarded first
  int64_t heals = 0;        // when it happened
};

FaultProxy::FaultProxy(const std::string& target, uint64_t seed)
    : listener_(NewSocket()), server_port_(PortOf(target)), random_(seed) {
  sockaddr_in address = Loopback(0);
  socklen_t size = sizeof(address);
  EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&address), size), 0);
  EXPECT_EQ(listen(listener_, 64), 0);
  getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
  port_ = ntohs(address.sin_port);
  acceptor_ = std::thread([this] { Accept(); });
}

FaultProxy::~FaultProxy() {
  stopping_ = true;
  acceptor_.join();
  for (Forwarder& forwarder : forwarders_) forwarder.thread.join();
  close(listener_);
}

std::string FaultProxy::target() const { return absl::StrCat("127.0.0.1:", port_); }

void FaultProxy::SetServer(const std::string& target) { server_port_ = PortOf(target); }

void FaultProxy::Arm(Fault fault) {
  absl::MutexLock lock(&mu_);
  armed_ = std::move(fault);
  next_ = nullptr;
  passed_ = 0;
  fired_ = false;
}

void FaultProxy::ArmEach(std::function<Fault()> next) {
  absl::MutexLock lock(&mu_);
  armed_ = next();
  next_ = std::move(next);
  passed_ = 0;
  fired_ = false;
}

bool FaultProxy::fired() const {
  const auto quiet = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return !calling_; };
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(&quiet));
  return fired_;
}

void FaultProxy::Delay(absl::Duration most) {
  absl::MutexLock lock(&mu_);
  delay_ = most;
}

void FaultProxy::Heal() {
  absl::MutexLock lock(&mu_);
  armed_.reset();
  next_ = nullptr;
  delay_ = absl::ZeroDuration();
  ++heals_;
}

int64_t FaultProxy::messages(Direction direction) const {
  absl::MutexLock lock(&mu_);
  return messages_[static_cast<size_t>(direction)];
}

void FaultProxy::Accept() {
  while (!stopping_) {
    pollfd waiting = {listener_, POLLIN, 0};
    if (poll(&waiting, 1, kPollMilliseconds) <= 0) continue;
    const int client = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (client < 0) continue;
    std::erase_if(forwarders_, [](Forwarder& forwarder) {
      if (forwarder.done) forwarder.thread.join();
      return forwarder.done.load();
    });
    Forwarder& forwarder = forwarders_.emplace_back();
    forwarder.thread = std::thread([this, client, &forwarder] {
      Forward(client);
      forwarder.done = true;
    });
  }
}

void FaultProxy::Forward(int client) {
  Connection connection{{client, NewSocket()}, {MessageBoundaries(true), MessageBoundaries(false)}};
  bool open = ConnectTo(connection.sockets[1], server_port_);
  while (open && !stopping_) {
    pollfd ends[] = {{connection.sockets[0], POLLIN, 0}, {connection.sockets[1], POLLIN, 0}};
    if (poll(ends, 2, kPollMilliseconds) <= 0) continue;
    if (ends[0].revents != 0) open = Copy(connection, Direction::kToServer);
    if (open && ends[1].revents != 0) open = Copy(connection, Direction::kToClient);
  }
  const linger linger_option = {.l_onoff = connection.reset ? 1 : 0, .l_linger = 0};
  for (int socket : connection.sockets) {
    setsockopt(socket, SOL_SOCKET, SO_LINGER, &linger_option, sizeof(linger_option));
    close(socket);
  }
}

// Forwards what has arrived; false when the connection is over.
bool FaultProxy::Copy(Connection& connection, Direction direction) {
  const auto from = static_cast<size_t>(direction);
  uint8_t buffer[16 << 10];
  const ssize_t size = recv(connection.sockets[from], buffer, sizeof(buffer), 0);
  if (size <= 0) {
    connection.reset = size < 0;
    return false;
  }
  absl::SleepFor(DrawDelay());
  absl::Span<const uint8_t> bytes(buffer, static_cast<size_t>(size));
  std::vector<size_t> ends = connection.boundaries[from].Take(bytes);
  while (true) {
    const std::optional<Happening> happening = Pass(direction, bytes.size(), ends);
    const size_t forward = happening.has_value() ? happening->bytes_before : bytes.size();
    if (!SendAll(connection.sockets[1 - from], bytes.first(forward))) return false;
    if (!happening.has_value()) return RefuseIfPossible(connection);
    if (happening->fault.action == Fault::Action::kRefuse) {
      connection.refuse = connection.boundaries[from].last_stream();
    }
    if (!Act(connection, *happening)) return false;
    bytes.remove_prefix(forward);
    std::erase_if(ends, [forward](size_t end) { return end <= forward; });
    for (size_t& end : ends) end -= forward;
  }
}

bool FaultProxy::RefuseIfPossible(Connection& connection) {
  if (connection.refuse == 0) return true;
  for (const MessageBoundaries& side : connection.boundaries) {
    if (!side.between_frames()) return true;
  }
  constexpr uint8_t kCancel = 8, kEnhanceYourCalm = 11;
  const uint32_t stream = std::exchange(connection.refuse, 0);
  ++refusals_;
  return SendAll(connection.sockets[0], ResetStream(stream, kEnhanceYourCalm)) &&
         SendAll(connection.sockets[1], ResetStream(stream, kCancel));
}

std::optional<FaultProxy::Happening> FaultProxy::Pass(Direction direction, size_t bytes,
                                                      absl::Span<const size_t> ends) {
  absl::MutexLock lock(&mu_);
  int64_t& messages = messages_[static_cast<size_t>(direction)];
  if (!armed_.has_value() || armed_->direction != direction) {
    messages += static_cast<int64_t>(ends.size());
    return std::nullopt;
  }
  const bool counts_bytes = armed_->unit == Fault::Unit::kBytes;
  const size_t units = counts_bytes ? bytes : ends.size();
  const auto left = static_cast<size_t>(armed_->after - passed_);
  if (left > units) {
    messages += static_cast<int64_t>(ends.size());
    passed_ += static_cast<int64_t>(units);
    return std::nullopt;
  }
  Happening happening{*std::move(armed_), left == 0 || counts_bytes ? left : ends[left - 1], heals_};
  messages += std::count_if(ends.begin(), ends.end(),
                            [&happening](size_t end) { return end <= happening.bytes_before; });
  armed_.reset();
  if (next_ != nullptr) armed_ = next_();
  passed_ = 0;
  fired_ = true;
  calling_ = happening.fault.call != nullptr;
  return happening;
}

bool FaultProxy::Act(Connection& connection, const Happening& happening) {
  const Fault& fault = happening.fault;
  if (fault.call != nullptr) {
    fault.call();
    absl::MutexLock lock(&mu_);
    calling_ = false;
  }
  switch (fault.action) {
    case Fault::Action::kReset:
    case Fault::Action::kClose:
      connection.reset = fault.action == Fault::Action::kReset;
      ++cuts_;
      return false;
    case Fault::Action::kNone:
    case Fault::Action::kRefuse:
      return true;
    case Fault::Action::kHold:
      while (heals() == happening.heals && !stopping_) absl::SleepFor(absl::Milliseconds(kPollMilliseconds));
      return !stopping_;
  }
  return false;
}

int64_t FaultProxy::heals() const {
  absl::MutexLock lock(&mu_);
  return heals_;
}

absl::Duration FaultProxy::DrawDelay() {
  absl::MutexLock lock(&mu_);
  return delay_ * std::uniform_real_distribution<>(0, 1)(random_);
}

}  // namespace lossd::test
