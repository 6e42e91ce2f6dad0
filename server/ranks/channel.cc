// SPDX-License-Identifier: Apache-2.0
#include "server/ranks/channel.h"

#include <grpcpp/client_context.h>
#include <openssl/crypto.h>

#include <algorithm>
#include <limits>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"

namespace lossd::ranks {
namespace {

constexpr const char* kSecretKey = "lossd-rank-secret";
constexpr int64_t kMebibyte = int64_t{1} << 20;
// Bytes that a row has beside its hidden state, with all inputs or all results, over those of the smallest
// hidden state, which has two.
constexpr int64_t kMostOverhead = 12;
// A row of a tensor has at most 2^24 floats.
constexpr int64_t kLargestRow = 64 * kMebibyte;

// What may be under way on a stream without being asked for, and the most that goes in one frame: chunks are
// many megabytes.
constexpr int kLookaheadBytes = 16 << 20;
constexpr int kFrameBytes = 1 << 20;

// How long a connection may be without a call; that of a rank always has one.
constexpr int kStrangerMilliseconds = 20'000;

// gRPC pings an end that is silent; it has half of the time to be so, and half to answer.
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
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 100);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kLookaheadBytes);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, kFrameBytes);
  // Those who have connected and are no rank.
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
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
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

}  // namespace lossd::ranks
