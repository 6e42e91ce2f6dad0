// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/probe_socket.h"

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "kernels/clocks/waits.h"

namespace lossd::client::internal {
namespace {

// What the thread of a look-up and its caller share.
struct Looking {
  clocks::Event done;
  addrinfo* found = nullptr;
  int error = 0;

  ~Looking() {
    if (found != nullptr) freeaddrinfo(found);
  }
};

std::string WhyNoAddress(int error) {
  return absl::StrCat("the name of the host was not found (", gai_strerror(error), ")");
}

}  // namespace

LookUp LookUpHost(const std::string& host, uint16_t port) {
  auto looking = std::make_shared<Looking>();
  std::thread([looking, host, port = absl::StrCat(port)] {
    addrinfo hints = {};
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    looking->error = getaddrinfo(host.c_str(), port.c_str(), &hints, &looking->found);
    looking->done.Notify();
  }).detach();
  if (!looking->done.AwaitFor(kProbePatience)) {
    return {nullptr, absl::StrCat("the name of the host was not found within ",
                                  absl::ToInt64Seconds(kProbePatience), " s")};
  }
  if (looking->error != 0 || looking->found == nullptr) return {nullptr, WhyNoAddress(looking->error)};
  return {Addresses(looking, looking->found), ""};
}

ProbeSocket ProbeSocket::ToHost(const addrinfo* addresses) {
  ProbeSocket first(addresses->ai_family, addresses->ai_addr, addresses->ai_addrlen);
  for (const addrinfo* next = addresses->ai_next; first.error_ != 0 && next != nullptr;
       next = next->ai_next) {
    ProbeSocket other(next->ai_family, next->ai_addr, next->ai_addrlen);
    if (other.error_ == 0) return other;
  }
  return first;
}

ProbeSocket ProbeSocket::ToPath(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) return ProbeSocket(ENAMETOOLONG);
  std::memcpy(address.sun_path, path.data(), path.size());
  return {AF_UNIX, &address, sizeof(address)};
}

ProbeSocket::ProbeSocket(int family, const void* address, size_t size)
    : descriptor_(socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  const timeval patience = absl::ToTimeval(kProbePatience);
  if (descriptor_ >= 0) {
    setsockopt(descriptor_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    setsockopt(descriptor_, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));  // of connect() too
    if (connect(descriptor_, static_cast<const sockaddr*>(address), static_cast<socklen_t>(size)) == 0)
      return;
  }
  error_ = errno == EINPROGRESS || errno == EAGAIN ? ETIMEDOUT : errno;
}

ProbeSocket::ProbeSocket(ProbeSocket&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), error_(other.error_) {}

ProbeSocket::~ProbeSocket() {
  if (descriptor_ >= 0) close(descriptor_);
}

Transport PlainTransport(int descriptor) {
  return {.send = [descriptor](const char* bytes,
                               size_t count) { return send(descriptor, bytes, count, MSG_NOSIGNAL); },
          .receive = [descriptor](char* bytes, size_t count) { return recv(descriptor, bytes, count, 0); }};
}

std::optional<std::string> FirstWords(const Transport& transport) {
  // Of an HTTP/2 client, with empty settings.
  constexpr absl::string_view kPreface("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0", 33);
  (void)transport.send(kPreface.data(), kPreface.size());  // a side that hangs up may have said something
  std::string words;
  char more[kFrameHeader];
  while (words.size() < kFrameHeader) {
    errno = 0;
    const std::ptrdiff_t count = transport.receive(more, kFrameHeader - words.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN && words.empty()) return std::nullopt;
    if (count <= 0) break;
    words.append(more, static_cast<size_t>(count));
  }
  return words;
}

bool AreHttp2Settings(absl::string_view words) {
  return words.size() >= kFrameHeader && words[0] == 0 && words[3] == 4 &&
         words.substr(5, 4) == absl::string_view("\0\0\0\0", 4);
}

}  // namespace lossd::client::internal
