// SPDX-License-Identifier: Apache-2.0
// Settings of the connection between the leader and a worker, and addresses of this host (channel.h).
#include "server/ranks/channel.h"

#include <arpa/inet.h>
#include <grpcpp/client_context.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <openssl/crypto.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <memory>

#include "absl/random/random.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace lossd::ranks {
namespace {

constexpr const char* kSecretKey = "lossd-rank-secret";
constexpr int64_t kMebibyte = int64_t{1} << 20;
// All other data of a row together are at most this many times as large as the row's hidden state. All
// inputs, or all results, are up to 12 times as large as the smallest hidden state, which has two bytes. A
// teacher's hidden state is up to kMostTeacherHidden times as large as the student's.
constexpr int64_t kMostOverhead = 12 + kMostTeacherHidden;
// A row of a tensor has at most 2^24 floats.
constexpr int64_t kLargestRow = 64 * kMebibyte;

// HTTP/2 flow control: how many bytes a stream may have in flight before the receiver reads, and the largest
// frame. The values are large because a chunk has many megabytes.
constexpr int kLookaheadBytes = 16 << 20;
constexpr int kFrameBytes = 1 << 20;

// A connection may be without a call for this long. The connection of a rank always has a call.
constexpr int kStrangerMilliseconds = 20'000;

// gRPC pings the other end after half of `silence` without data, and waits the other half for an answer.
int HalfOf(absl::Duration silence) {
  return static_cast<int>(std::max<int64_t>(1, absl::ToInt64Milliseconds(silence / 2)));
}

}  // namespace

int64_t MaxMessageBytes(const ChannelLimits& limits) {
  return std::min<int64_t>(std::numeric_limits<int>::max(),
                           std::max((1 + kMostOverhead) * limits.slice_bytes, kLargestRow) + kMebibyte);
}

void Configure(const ChannelLimits& limits, grpc::ServerBuilder* builder) {
  const auto largest = static_cast<int>(MaxMessageBytes(limits));
  builder->SetMaxReceiveMessageSize(largest);
  builder->SetMaxSendMessageSize(largest);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, HalfOf(limits.silence));
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, HalfOf(limits.silence));
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);  // pings never end a connection
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 100);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kLookaheadBytes);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, kFrameBytes);
  // The next two settings close connections of clients that are not ranks.
  builder->AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kStrangerMilliseconds);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, kStrangerMilliseconds);
}

grpc::ChannelArguments ArgumentsOf(const ChannelLimits& limits) {
  grpc::ChannelArguments arguments;
  const auto largest = static_cast<int>(MaxMessageBytes(limits));
  arguments.SetMaxReceiveMessageSize(largest);
  arguments.SetMaxSendMessageSize(largest);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, HalfOf(limits.silence));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, HalfOf(limits.silence));
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kLookaheadBytes);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, kFrameBytes);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // each channel has its own connection
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);          // no proxy, even if the environment names one
  return arguments;
}

std::string NewLocalName() {
  absl::BitGen random;
  return absl::StrCat("lossd-ranks-", absl::Hex(absl::Uniform<uint64_t>(random), absl::kZeroPad16),
                      absl::Hex(absl::Uniform<uint64_t>(random), absl::kZeroPad16));
}

void AddSecret(const std::string& secret, grpc::ClientContext* context) {
  if (!secret.empty()) context->AddMetadata(kSecretKey, secret);
}

absl::Status CheckSecret(const std::string& secret, const grpc::ServerContext& context) {
  if (secret.empty()) return absl::OkStatus();
  const auto found = context.client_metadata().find(kSecretKey);
  if (found != context.client_metadata().end() && found->second.size() == secret.size() &&
      CRYPTO_memcmp(found->second.data(), secret.data(), secret.size()) == 0) {
    return absl::OkStatus();
  }
  return absl::UnauthenticatedError("the secret of the ranks is missing or another one (--rank_secret_file)");
}

// ---- The host's name and address ----

namespace {

std::string TextOf(const sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = {};
  const void* const bytes =
      address->sa_family == AF_INET6
          ? static_cast<const void*>(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr)
          : &reinterpret_cast<const sockaddr_in*>(address)->sin_addr;
  return inet_ntop(address->sa_family, bytes, text, sizeof(text)) == nullptr ? "" : text;
}

bool IsLoopback(const std::string& text) { return absl::StartsWith(text, "127.") || text == "::1"; }

// The source address that packets to `to` would have. Sends nothing.
std::string SourceFor(const addrinfo& to) {
  const int descriptor = socket(to.ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (descriptor < 0) return "";
  sockaddr_storage from = {};
  socklen_t length = sizeof(from);
  auto* const address = reinterpret_cast<sockaddr*>(&from);
  const bool known =
      connect(descriptor, to.ai_addr, to.ai_addrlen) == 0 && getsockname(descriptor, address, &length) == 0;
  close(descriptor);
  return known ? TextOf(address) : "";
}

// The first IPv4 address of this host that is not a loopback address; empty if there is none.
std::string AnyAddress() {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return "";
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(all, freeifaddrs);
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
    const bool usable = one->ifa_addr != nullptr && one->ifa_addr->sa_family == AF_INET &&
                        (one->ifa_flags & IFF_UP) != 0 && (one->ifa_flags & IFF_LOOPBACK) == 0;
    if (usable) return TextOf(one->ifa_addr);
  }
  return "";
}

}  // namespace

absl::StatusOr<std::string> LocalAddressFor(const std::string& host) {
  const std::string name =
      absl::StartsWith(host, "[") && absl::EndsWith(host, "]") ? host.substr(1, host.size() - 2) : host;
  addrinfo hints = {};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  // Any port will do, because nothing is sent.
  const int error = getaddrinfo(name.c_str(), "9", &hints, &found);
  if (error != 0) {
    return absl::UnavailableError(absl::StrCat("host ", host, " cannot be resolved: ", gai_strerror(error)));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, freeaddrinfo);
  // Whether a loopback address is meant.
  const bool meant = name == "localhost" || IsLoopback(name);
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    const std::string source = SourceFor(*one);
    if (source.empty()) continue;
    if (meant || !IsLoopback(source)) return source;
    // A host may resolve its own name to a loopback address, which other hosts cannot reach.
    const std::string other = AnyAddress();
    return other.empty() ? source : other;
  }
  return absl::UnavailableError(absl::StrCat("there is no route to host ", host));
}

std::string HostName() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "unknown";
}

}  // namespace lossd::ranks
