// SPDX-License-Identifier: Apache-2.0
// Connections by which tests send well-formed or malformed HTTP to servers, byte by byte, and read the
// answers.
#ifndef LOSSD_TESTS_SUPPORT_RAW_HTTP_H_
#define LOSSD_TESTS_SUPPORT_RAW_HTTP_H_

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/fsuid.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace lossd::test {

// While it exists, sockets that this thread creates belong to another user, which the kernel tells a server
// on the loopback. Only root can do that. Thread-compatible; at most one at a time.
class AsUser {
 public:
  explicit AsUser(uid_t user) : own_(static_cast<uid_t>(setfsuid(user))) {}
  ~AsUser() { setfsuid(own_); }
  AsUser(const AsUser&) = delete;
  AsUser& operator=(const AsUser&) = delete;

 private:
  const uid_t own_;
};

// A TCP connection to an HTTP server that sends exactly the bytes it is given, well-formed or not, and reads
// what comes back. Thread-compatible.
class RawHttp {
 public:
  // `address`: an IPv4 address and a port, "127.0.0.1:80"; 0.0.0.0 stands for 127.0.0.1. `source`: the IPv4
  // address from which the connection comes. Sends and reads fail after `limit`.
  explicit RawHttp(absl::string_view address, absl::Duration limit = absl::Seconds(60),
                   const std::string& source = "127.0.0.1")
      : descriptor_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const size_t colon = address.rfind(':');
    std::string host(address.substr(0, colon));
    if (host == "0.0.0.0") host = "127.0.0.1";
    int port = 0;
    const timeval timeout = absl::ToTimeval(limit);
    const int one = 1;
    setsockopt(descriptor_, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
    setsockopt(descriptor_, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
    setsockopt(descriptor_, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &one, sizeof(one));
    const sockaddr_in from = Ipv4(source, 0);
    connected_ = absl::SimpleAtoi(address.substr(colon + 1), &port) &&
                 bind(descriptor_, reinterpret_cast<const sockaddr*>(&from), sizeof(from)) == 0 &&
                 Connect(host, port);
  }
  ~RawHttp() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  RawHttp(RawHttp&& other) noexcept
      : descriptor_(std::exchange(other.descriptor_, -1)), connected_(other.connected_) {}
  RawHttp(const RawHttp&) = delete;
  RawHttp& operator=(const RawHttp&) = delete;

  bool connected() const { return connected_; }

  // False if the server closed the connection before it had read everything.
  bool Send(absl::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = send(descriptor_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return false;
      bytes.remove_prefix(static_cast<size_t>(sent));
    }
    return true;
  }
  // Tells the server that no more bytes follow.
  void FinishSending() { shutdown(descriptor_, SHUT_WR); }

  // Reads all bytes up to the end of the connection. Sets timed_out() if the end does not come.
  std::string ReadToEnd() {
    std::string answer;
    char buffer[16384];
    while (true) {
      const ssize_t count = recv(descriptor_, buffer, sizeof(buffer), 0);
      if (count <= 0) {
        timed_out_ = count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
        return answer;
      }
      answer.append(buffer, static_cast<size_t>(count));
    }
  }
  bool timed_out() const { return timed_out_; }

  // Closes the connection with a reset.
  void Reset() {
    const linger at_once = {.l_onoff = 1, .l_linger = 0};
    setsockopt(descriptor_, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
    close(std::exchange(descriptor_, -1));
  }

 private:
  static sockaddr_in Ipv4(const std::string& host, int port) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    inet_pton(AF_INET, host.c_str(), &address.sin_addr);
    return address;
  }
  bool Connect(const std::string& host, int port) const {
    const sockaddr_in to = Ipv4(host, port);
    return connect(descriptor_, reinterpret_cast<const sockaddr*>(&to), sizeof(to)) == 0;
  }

  int descriptor_;
  bool connected_ = false;
  bool timed_out_ = false;
};

// Everything the server at `address` answers to `request`; empty if it hangs up without an answer.
inline std::string HttpExchange(absl::string_view address, absl::string_view request) {
  RawHttp connection(address);
  connection.Send(request);
  return connection.ReadToEnd();
}

// A GET of `path` as a scraper sends it.
inline std::string HttpGet(absl::string_view address, absl::string_view path) {
  return HttpExchange(address, absl::StrCat("GET ", path, " HTTP/1.1\r\nHost: localhost\r\n\r\n"));
}

// The status code of an answer; 0 if it does not start with a status line.
inline int HttpStatus(absl::string_view answer) {
  int status = 0;
  const bool line =
      answer.size() >= 12 && (answer.substr(0, 9) == "HTTP/1.1 " || answer.substr(0, 9) == "HTTP/1.0 ");
  return line && absl::SimpleAtoi(answer.substr(9, 3), &status) ? status : 0;
}

// One HTTP/2 connection to a gRPC server that does what no gRPC client does: it abandons calls, sends the
// length of a message without the message, and does not read answers. It obeys flow control and answers
// pings, so the server has no reason to close it. Thread-compatible; all work is done in Pump.
class RawHttp2 {
 public:
  // Connects to "host:port", from a loopback address.
  explicit RawHttp2(absl::string_view target, const std::string& source = "127.0.0.1")
      : descriptor_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const size_t colon = target.rfind(':');
    int port = 0;
    const sockaddr_in from = Address(source, 0);
    open_ = absl::SimpleAtoi(target.substr(colon + 1), &port) &&
            bind(descriptor_, reinterpret_cast<const sockaddr*>(&from), sizeof(from)) == 0;
    const sockaddr_in to = Address(std::string(target.substr(0, colon)), static_cast<uint16_t>(port));
    open_ = open_ && connect(descriptor_, reinterpret_cast<const sockaddr*>(&to), sizeof(to)) == 0;
    fcntl(descriptor_, F_SETFL, O_NONBLOCK);
    out_ = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    AddFrame(kSettings, 0, 0, "");
  }
  ~RawHttp2() { close(descriptor_); }
  RawHttp2(const RawHttp2&) = delete;
  RawHttp2& operator=(const RawHttp2&) = delete;

  // False after the server has closed or refused the connection.
  bool open() const { return open_; }
  // The number of calls that the server has not ended.
  size_t calls() const { return calls_.size(); }
  int64_t bytes_sent() const { return bytes_sent_; }

  // Begins a call of "/package.Service/Method" and returns its id.
  uint32_t Call(absl::string_view path) {
    const uint32_t id = std::exchange(next_id_, next_id_ + 2);
    calls_[id].window = initial_window_;
    AddFrame(kHeaders, kEndHeaders, id,
             absl::StrCat(Header(":method", "POST"), Header(":scheme", "http"), Header(":path", path),
                          Header(":authority", "localhost"), Header("te", "trailers"),
                          Header("content-type", "application/grpc")));
    return id;
  }
  // Sends the beginning of a message of `size` bytes: first `bytes`, then `zeros` zeros, at most `size`
  // together.
  void Message(uint32_t id, uint32_t size, absl::string_view bytes, int64_t zeros = 0) {
    const auto call = calls_.find(id);
    if (call == calls_.end()) return;
    const char length[5] = {0, static_cast<char>(size >> 24), static_cast<char>(size >> 16),
                            static_cast<char>(size >> 8), static_cast<char>(size)};
    call->second.pending.append(length, sizeof(length));
    call->second.pending.append(bytes.data(), bytes.size());
    call->second.zeros += zeros;
  }
  void Message(uint32_t id, absl::string_view bytes) {
    Message(id, static_cast<uint32_t>(bytes.size()), bytes);
  }

  // Sends a ping, which the server has to answer.
  void Ping() { AddFrame(6, 0, 0, std::string(8, 'p')); }

  // Sends and receives for this time.
  void Pump(absl::Duration time) {
    const absl::Time end = absl::Now() + time;
    while (open_) {
      FillOut();
      const absl::Duration left = end - absl::Now();
      pollfd ready = {.fd = descriptor_,
                      .events = static_cast<int16_t>(out_.empty() ? POLLIN : POLLIN | POLLOUT)};
      if (left <= absl::ZeroDuration()) break;
      if (poll(&ready, 1, static_cast<int>(absl::ToInt64Milliseconds(left)) + 1) <= 0) continue;
      if ((ready.revents & POLLOUT) != 0) Write();
      if ((ready.revents & (POLLIN | POLLHUP | POLLERR)) != 0) Read();
    }
  }

 private:
  enum Type : uint8_t {
    kData = 0,
    kHeaders = 1,
    kReset = 3,
    kSettings = 4,
    kPing = 6,
    kGoAway = 7,
    kWindow = 8
  };
  static constexpr uint8_t kEndStream = 1, kAck = 1, kEndHeaders = 4;

  struct Stream {
    int64_t window = 0;
    std::string pending;
    int64_t zeros = 0;  // the number of zeros to send after `pending`
  };

  static sockaddr_in Address(const std::string& host, uint16_t port) {
    sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    inet_pton(AF_INET, host.c_str(), &address.sin_addr);
    return address;
  }
  // A literal header without indexing (RFC 7541, 6.2.2).
  static std::string Header(absl::string_view name, absl::string_view value) {
    std::string text(1, '\0');
    text.push_back(static_cast<char>(name.size()));
    text.append(name.data(), name.size());
    text.push_back(static_cast<char>(value.size()));
    return text.append(value.data(), value.size());
  }
  static uint32_t Number(const char* bytes) {
    const auto* b = reinterpret_cast<const uint8_t*>(bytes);
    return uint32_t{b[0]} << 24 | uint32_t{b[1]} << 16 | uint32_t{b[2]} << 8 | uint32_t{b[3]};
  }
  void AddFrame(uint8_t type, uint8_t flags, uint32_t stream, absl::string_view payload) {
    const auto size = static_cast<uint32_t>(payload.size());
    const char header[9] = {
        static_cast<char>(size >> 16),   static_cast<char>(size >> 8),   static_cast<char>(size),
        static_cast<char>(type),         static_cast<char>(flags),       static_cast<char>(stream >> 24),
        static_cast<char>(stream >> 16), static_cast<char>(stream >> 8), static_cast<char>(stream)};
    out_.append(header, sizeof(header));
    out_.append(payload.data(), payload.size());
  }

  // Turns pending bytes into frames, as many as the flow-control windows allow, without filling the buffer
  // much.
  void FillOut() {
    constexpr int64_t kFrame = 16384;
    for (auto& [id, call] : calls_) {
      while (out_.size() < (size_t{1} << 18)) {
        const int64_t has = static_cast<int64_t>(call.pending.size()) + call.zeros;
        const int64_t size = std::min({kFrame, has, call.window, window_});
        if (size <= 0) break;
        const auto from_pending = std::min(static_cast<size_t>(size), call.pending.size());
        std::string payload = call.pending.substr(0, from_pending);
        call.pending.erase(0, from_pending);
        call.zeros -= size - static_cast<int64_t>(from_pending);
        payload.resize(static_cast<size_t>(size));
        call.window -= size;
        window_ -= size;
        bytes_sent_ += size;
        AddFrame(kData, 0, id, payload);
      }
    }
  }
  void Write() {
    const ssize_t sent = send(descriptor_, out_.data(), out_.size(), MSG_NOSIGNAL);
    if (sent > 0) out_.erase(0, static_cast<size_t>(sent));
    if (sent < 0 && errno != EAGAIN) open_ = false;
  }
  void Read() {
    char buffer[1 << 16];
    const ssize_t got = recv(descriptor_, buffer, sizeof(buffer), 0);
    if (got == 0 || (got < 0 && errno != EAGAIN)) open_ = false;
    if (got <= 0) return;
    in_.append(buffer, static_cast<size_t>(got));
    size_t at = 0;
    while (in_.size() - at >= 9) {
      const size_t size = Number(in_.data() + at) >> 8;
      if (in_.size() - at < 9 + size) break;
      Handle(static_cast<uint8_t>(in_[at + 3]), static_cast<uint8_t>(in_[at + 4]),
             Number(in_.data() + at + 5) & 0x7fffffff, absl::string_view(in_).substr(at + 9, size));
      at += 9 + size;
    }
    in_.erase(0, at);
  }
  void Handle(uint8_t type, uint8_t flags, uint32_t id, absl::string_view payload) {
    const auto call = calls_.find(id);
    if (type == kSettings && (flags & kAck) == 0) {
      for (size_t i = 0; i + 6 <= payload.size(); i += 6) {
        if (payload[i] != 0 || payload[i + 1] != 4) continue;  // SETTINGS_INITIAL_WINDOW_SIZE
        const int64_t window = Number(payload.data() + i + 2);
        for (auto& [other, stream] : calls_) stream.window += window - initial_window_;
        initial_window_ = window;
      }
      AddFrame(kSettings, kAck, 0, "");
    } else if (type == kPing && (flags & kAck) == 0) {
      AddFrame(kPing, kAck, 0, payload);
    } else if (type == kWindow) {
      const int64_t more = Number(payload.data()) & 0x7fffffff;
      if (id == 0) window_ += more;
      if (call != calls_.end()) call->second.window += more;
    } else if (call != calls_.end() &&
               (type == kReset || ((type == kHeaders || type == kData) && (flags & kEndStream)))) {
      calls_.erase(call);
    }
  }

  const int descriptor_;
  bool open_ = false;
  std::string out_, in_;
  uint32_t next_id_ = 1;
  std::map<uint32_t, Stream> calls_;
  int64_t initial_window_ = 65535;
  int64_t window_ = 65535;  // of the connection
  int64_t bytes_sent_ = 0;
};

// ---- Pages of metrics in Prometheus' text format ----

// The value of a series of the page, such as "name{label=\"value\"}"; -1 if the page does not have it.
inline double ValueOf(const std::string& metrics, const std::string& series) {
  const size_t found = metrics.find(absl::StrCat("\n", series, " "));
  return found == std::string::npos ? -1 : std::atof(metrics.c_str() + found + series.size() + 2);
}

// The name of the series with the seconds of a rank's exchanges.
inline std::string CollectiveSeconds(int rank, const char* operation) {
  return absl::StrCat("lossd_rank_collective_seconds_total{rank=\"", rank, "\",operation=\"", operation,
                      "\"}");
}

}  // namespace lossd::test

#endif  // LOSSD_TESTS_SUPPORT_RAW_HTTP_H_
