// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/pulse.h"

#include <sys/socket.h>

#include <cstdint>
#include <utility>

#include "absl/strings/string_view.h"

namespace lossd::rpc {
namespace {

constexpr absl::Duration kAsk = absl::Seconds(1);

// HTTP/2: a frame begins with its length (3 bytes), type, flags and stream. SETTINGS without any is a
// question that the other side has to acknowledge, and unlike PING it may be asked as often as one likes.
constexpr absl::string_view kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
constexpr absl::string_view kSettings("\0\0\0\4\0\0\0\0\0", 9);
constexpr absl::string_view kAcknowledge("\0\0\0\4\1\0\0\0\0", 9);
constexpr size_t kFrameHeader = 9;
constexpr size_t kMostUnread = size_t{64} << 10;
constexpr uint8_t kSettingsType = 4;
constexpr uint8_t kPingType = 6;
constexpr uint8_t kAckFlag = 1;

bool Send(int socket, absl::string_view bytes) {
  return send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(bytes.size());
}

}  // namespace

Pulse::Pulse(grpc::ServerBuilder* builder)
    : taker_(builder->experimental().AddExternalConnectionAcceptor(
          grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
          grpc::InsecureServerCredentials())) {}

void Pulse::Start() {
  beat_.Beat();
  watched_ = true;
  Ask();  // the connection is there from the start
  thread_.emplace(kAsk, [this] { Ask(); });
}

void Pulse::Stop() {
  watched_ = false;
  thread_.reset();
  socket_ = wire::OwnedDescriptor();
}

bool Pulse::Connect() {
  int ends[2] = {-1, -1};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0) return false;
  socket_ = wire::OwnedDescriptor(ends[0]);
  unread_.clear();
  unanswered_ = 0;
  grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters mine;
  mine.listener_fd = -1;
  mine.fd = ends[1];
  taker_->HandleNewConnection(&mine);
  return Send(socket_.get(), kPreface) && Send(socket_.get(), kSettings);
}

// gRPC closes the connection when it is short of memory, or when the connection has been idle for long: then
// Pulse makes another one. If no descriptor is left to connect with, gRPC does not count as silent.
void Pulse::Ask() {
  if (socket_) ReadAnswers();
  if (!socket_) {
    if (!Connect()) beat_.Beat();
    unanswered_ = 1;
    return;
  }
  if (unanswered_ == 0 && Send(socket_.get(), kSettings)) unanswered_ = 1;
}

void Pulse::ReadAnswers() {
  char bytes[4096];
  while (true) {
    const ssize_t received = recv(socket_.get(), bytes, sizeof(bytes), MSG_DONTWAIT);
    if (received < 0) break;
    if (received == 0) {
      beat_.Beat();  // it has closed the connection: it is alive
      socket_ = wire::OwnedDescriptor();
      return;
    }
    unread_.append(bytes, static_cast<size_t>(received));
  }
  size_t at = 0;
  while (unread_.size() - at >= kFrameHeader) {
    const auto byte = [&](size_t i) { return static_cast<uint8_t>(unread_[at + i]); };
    const size_t length = size_t{byte(0)} << 16 | size_t{byte(1)} << 8 | byte(2);
    if (unread_.size() - at < kFrameHeader + length) break;
    const bool acknowledges = (byte(4) & kAckFlag) != 0;
    if (byte(3) == kSettingsType && !acknowledges) Send(socket_.get(), kAcknowledge);
    if (byte(3) == kPingType && !acknowledges) {
      std::string answer = unread_.substr(at, kFrameHeader + length);
      answer[4] = static_cast<char>(kAckFlag);
      Send(socket_.get(), answer);
    }
    if (byte(3) == kSettingsType && acknowledges) {
      unanswered_ = 0;
      beat_.Beat();
    }
    at += kFrameHeader + length;
  }
  unread_.erase(0, at);
  if (unread_.size() > kMostUnread) socket_ = wire::OwnedDescriptor();
}

}  // namespace lossd::rpc
