// SPDX-License-Identifier: Apache-2.0
#include "tests/faults/fault_proxy.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"

namespace lossd::test {
namespace {

constexpr int kPollMilliseconds = 20;

// Where a socket listens or leads to.
struct SocketAddress {
  sockaddr_storage storage = {};
  socklen_t size = sizeof(storage);

  int family() const { return storage.ss_family; }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

bool IsUnix(absl::string_view target) { return absl::StartsWith(target, "unix:"); }

SocketAddress UnixAddress(absl::string_view path) {
  SocketAddress address;
  auto* const name = reinterpret_cast<sockaddr_un*>(&address.storage);
  name->sun_family = AF_UNIX;
  EXPECT_LT(path.size(), sizeof(name->sun_path)) << path;
  path.copy(name->sun_path, sizeof(name->sun_path) - 1);
  address.size = sizeof(*name);
  return address;
}

SocketAddress Loopback(int port) {
  SocketAddress address;
  auto* const name = reinterpret_cast<sockaddr_in*>(&address.storage);
  name->sin_family = AF_INET;
  name->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  name->sin_port = htons(static_cast<uint16_t>(port));
  address.size = sizeof(*name);
  return address;
}

// Of "unix:PATH" or "127.0.0.1:port".
SocketAddress AddressOf(absl::string_view target) {
  if (absl::ConsumePrefix(&target, "unix:")) return UnixAddress(target);
  int port = 0;
  EXPECT_TRUE(absl::SimpleAtoi(target.substr(target.rfind(':') + 1), &port)) << target;
  return Loopback(port);
}

uint16_t PortOf(int socket) {
  SocketAddress own;
  getsockname(socket, own.get(), &own.size);
  return ntohs(reinterpret_cast<const sockaddr_in*>(&own.storage)->sin_port);
}

int NewSocket(int family) {
  const int descriptor = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  if (family == AF_INET) setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  return descriptor;
}

// A socket that tries a port that no process listens on may be given that very port and reach itself.
bool ReachedItself(int socket, const SocketAddress& address) {
  return address.family() == AF_INET &&
         PortOf(socket) == ntohs(reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_port);
}

bool ConnectTo(int socket, const SocketAddress& address) {
  return connect(socket, address.get(), address.size) == 0 && !ReachedItself(socket, address);
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

FaultProxy::FaultProxy(const std::string& target, uint64_t seed) : server_(target), random_(seed) {
  const std::string path = folder_.File("proxy");
  const SocketAddress address = IsUnix(target) ? UnixAddress(path) : Loopback(0);
  listener_ = NewSocket(address.family());
  EXPECT_EQ(bind(listener_, address.get(), address.size), 0);
  EXPECT_EQ(listen(listener_, 64), 0);
  target_ = IsUnix(target) ? absl::StrCat("unix:", path) : absl::StrCat("127.0.0.1:", PortOf(listener_));
  acceptor_ = std::thread([this] { Accept(); });
}

FaultProxy::~FaultProxy() {
  stopping_ = true;
  acceptor_.join();
  for (Forwarder& forwarder : forwarders_) forwarder.thread.join();
  close(listener_);
}

void FaultProxy::SetServer(const std::string& target) {
  absl::MutexLock lock(&mu_);
  server_ = target;
}

std::string FaultProxy::server() const {
  absl::MutexLock lock(&mu_);
  return server_;
}

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

std::array<int64_t, 2> FaultProxy::bytes() const {
  absl::MutexLock lock(&mu_);
  return bytes_;
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
  const SocketAddress server = AddressOf(this->server());
  Connection connection{{client, NewSocket(server.family())},
                        {MessageBoundaries(true), MessageBoundaries(false)}};
  bool open = ConnectTo(connection.sockets[1], server);
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
  int64_t& passed_bytes = bytes_[static_cast<size_t>(direction)];
  if (!armed_.has_value() || armed_->direction != direction) {
    messages += static_cast<int64_t>(ends.size());
    passed_bytes += static_cast<int64_t>(bytes);
    return std::nullopt;
  }
  const bool counts_bytes = armed_->unit == Fault::Unit::kBytes;
  const size_t units = counts_bytes ? bytes : ends.size();
  const auto left = static_cast<size_t>(armed_->after - passed_);
  if (left > units) {
    messages += static_cast<int64_t>(ends.size());
    passed_bytes += static_cast<int64_t>(bytes);
    passed_ += static_cast<int64_t>(units);
    return std::nullopt;
  }
  Happening happening{*std::move(armed_), left == 0 || counts_bytes ? left : ends[left - 1], heals_};
  messages += std::count_if(ends.begin(), ends.end(),
                            [&happening](size_t end) { return end <= happening.bytes_before; });
  passed_bytes += static_cast<int64_t>(happening.bytes_before);
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

namespace {

constexpr size_t kPrefaceBytes = 24;
constexpr size_t kFrameHeaderBytes = 9;  // length (3), type, flags, stream (4)
constexpr size_t kPrefixBytes = 5;
constexpr uint8_t kData = 0;
constexpr uint8_t kHeaders = 1;
constexpr uint8_t kContinuation = 9;
constexpr uint8_t kEndHeaders = 4;  // a flag

}  // namespace

MessageBoundaries::MessageBoundaries(bool from_client) : preface_left_(from_client ? kPrefaceBytes : 0) {}

void MessageBoundaries::TakeHeaderByte(uint8_t byte) {
  if (header_bytes_ == 0) payload_left_ = stream_ = 0;
  if (header_bytes_ < 3) payload_left_ = payload_left_ << 8 | byte;
  if (header_bytes_ == 3) type_ = byte;
  if (header_bytes_ == 4) flags_ = byte;
  if (header_bytes_ > 4) stream_ = stream_ << 8 | byte;
  ++header_bytes_;
}

bool MessageBoundaries::TakeMessage(Message& message, absl::Span<const uint8_t> payload, size_t* taken) {
  *taken = 0;
  while (message.prefix_bytes < kPrefixBytes && *taken < payload.size()) {
    message.length = message.length << 8 | payload[(*taken)++];  // the first byte is shifted out
    if (++message.prefix_bytes == kPrefixBytes) message.bytes_left = message.length;
  }
  if (message.prefix_bytes < kPrefixBytes) return false;
  const size_t body = std::min<uint64_t>(message.bytes_left, payload.size() - *taken);
  *taken += body;
  message.bytes_left -= body;
  return message.bytes_left == 0;
}

std::vector<size_t> MessageBoundaries::Take(absl::Span<const uint8_t> bytes) {
  std::vector<size_t> boundaries;
  size_t i = std::min(preface_left_, bytes.size());
  preface_left_ -= i;
  while (i < bytes.size()) {
    if (header_bytes_ < kFrameHeaderBytes) {
      TakeHeaderByte(bytes[i++]);
    } else {
      const size_t most = std::min<size_t>(payload_left_, bytes.size() - i);
      size_t taken = most;
      bool boundary = false;
      if (type_ == kData) {
        Message& message = messages_[stream_];
        boundary = TakeMessage(message, bytes.subspan(i, most), &taken);
        if (boundary) message = Message();
      }
      i += taken;
      payload_left_ -= static_cast<uint32_t>(taken);
      if (boundary) boundaries.push_back(i);
    }
    if (header_bytes_ == kFrameHeaderBytes && payload_left_ == 0) {
      if (type_ == kHeaders) boundaries.push_back(i);
      if (type_ == kHeaders || type_ == kData) last_stream_ = stream_;
      if (type_ == kHeaders || type_ == kContinuation) continues_ = (flags_ & kEndHeaders) == 0;
      header_bytes_ = 0;
    }
  }
  return boundaries;
}

}  // namespace lossd::test
