// SPDX-License-Identifier: Apache-2.0
// A TCP connection to an HTTP server that sends exactly the bytes it is given, well-formed or not, and reads
// what comes back. Thread-compatible.
#ifndef LOSSD_TESTS_SUPPORT_RAW_HTTP_H_
#define LOSSD_TESTS_SUPPORT_RAW_HTTP_H_

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace lossd::test {

class RawHttp {
 public:
  // `address`: an IPv4 address and a port, "127.0.0.1:80"; 0.0.0.0 stands for 127.0.0.1. `source` is the IPv4
  // address that the connection comes from. Sends and reads give up after `limit`.
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

  // False if the server hung up before it had taken all.
  bool Send(absl::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = send(descriptor_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return false;
      bytes.remove_prefix(static_cast<size_t>(sent));
    }
    return true;
  }
  // Tells the server that nothing more comes.
  void FinishSending() { shutdown(descriptor_, SHUT_WR); }

  // All bytes up to the end of the connection. Sets timed_out() if the end does not come.
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

  // Hangs up with a reset instead of an orderly end.
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

}  // namespace lossd::test

#endif  // LOSSD_TESTS_SUPPORT_RAW_HTTP_H_
