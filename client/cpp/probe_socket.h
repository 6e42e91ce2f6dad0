// SPDX-License-Identifier: Apache-2.0
// A connection of a probe (probe.h), on which nothing blocks for longer than kProbePatience.
//
// Thread-compatible.
#ifndef LOSSD_CLIENT_CPP_PROBE_SOCKET_H_
#define LOSSD_CLIENT_CPP_PROBE_SOCKET_H_

#include <netdb.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace lossd::client::internal {

inline constexpr absl::Duration kProbePatience = absl::Seconds(2);
inline constexpr size_t kFrameHeader = 9;  // bytes before the payload of a frame of HTTP/2

using Addresses = std::shared_ptr<const addrinfo>;

struct LookUp {
  Addresses addresses;  // null: there are none
  std::string why;      // if there are none
};
// The host's addresses. The resolver's own timeouts are long, so a thread of its own waits for it, and goes
// on waiting behind the end of this call.
LookUp LookUpHost(const std::string& host, uint16_t port);

class ProbeSocket {
 public:
  // Connects to the first address that lets it; error() is errno if none does, ETIMEDOUT if none answers.
  static ProbeSocket ToHost(const addrinfo* addresses);
  static ProbeSocket ToPath(const std::string& path);

  ProbeSocket(ProbeSocket&& other) noexcept;
  ProbeSocket& operator=(ProbeSocket&&) = delete;
  ~ProbeSocket();

  int descriptor() const { return descriptor_; }
  int error() const { return error_; }  // 0: it is connected

 private:
  ProbeSocket(int family, const void* address, size_t size);
  explicit ProbeSocket(int error) : error_(error) {}

  int descriptor_ = -1;
  int error_ = 0;
};

// How bytes go out and come in: the number of bytes, 0 at the end of the connection, negative with errno set;
// errno is EAGAIN if the other side says nothing.
struct Transport {
  std::function<std::ptrdiff_t(const char* bytes, size_t count)> send;
  std::function<std::ptrdiff_t(char* bytes, size_t count)> receive;
};
Transport PlainTransport(int descriptor);

// The first bytes that the other side says to an HTTP/2 client, at most kFrameHeader; empty if it hangs up;
// nullopt if it says nothing.
std::optional<std::string> FirstWords(const Transport& transport);

// Whether `words` begin with the settings that an HTTP/2 server says first: a frame of type 4 for stream 0.
bool AreHttp2Settings(absl::string_view words);

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_PROBE_SOCKET_H_
