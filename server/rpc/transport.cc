// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/transport.h"

#include <grpcpp/resource_quota.h>

#include <algorithm>

namespace lossd::rpc {
namespace {

int Milliseconds(absl::Duration duration) { return static_cast<int>(absl::ToInt64Milliseconds(duration)); }

// What a call may send ahead of the message that the server has asked for: 256 KiB of 256 MiB, so that the
// windows of as many calls as there may be take a fraction of the memory, and messages the rest.
int WindowBytes(int64_t transport_bytes) {
  return static_cast<int>(std::clamp<int64_t>(transport_bytes / 1024, 64 << 10, 16 << 20));
}

}  // namespace

void Configure(const TransportOptions& options, grpc::ServerBuilder* builder) {
  // Threads are those of gRPC's synchronous services, which are reflection alone.
  constexpr int kThreads = 32;
  grpc::ResourceQuota quota("lossd");
  quota.Resize(static_cast<size_t>(options.bytes)).SetMaxThreads(kThreads);
  builder->SetResourceQuota(quota);
  builder->SetMaxReceiveMessageSize(static_cast<int>(options.max_message_bytes));
  builder->SetMaxSendMessageSize(static_cast<int>(options.max_message_bytes));
  const auto set = [builder](const char* name, int value) { builder->AddChannelArgument(name, value); };
  set(GRPC_ARG_MAX_CONCURRENT_STREAMS, static_cast<int>(options.max_calls_per_connection));
  set(GRPC_ARG_MAX_METADATA_SIZE, 16 << 10);
  set(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, Milliseconds(options.handshake_timeout));
  set(GRPC_ARG_MAX_CONNECTION_IDLE_MS, Milliseconds(options.idle_connection_timeout));
  if (options.connection_age < absl::InfiniteDuration())
    set(GRPC_ARG_MAX_CONNECTION_AGE_MS, Milliseconds(options.connection_age));
  // Windows that gRPC adapts by itself grow to many MiB a call when a client sends faster than rows are
  // computed, until the memory is used up and calls are cancelled.
  set(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  // With the windows gRPC would also have grown the frames that clients send, from 16 KiB.
  set(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, 1 << 20);
  set(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, WindowBytes(options.bytes));
  // Peers that vanished without a word are noticed within a minute.
  set(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
  set(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20'000);
  // A client that pings more often than this while nothing is sent to it, twice beyond it, loses its
  // connection. Keepalives of a few seconds are usual; so many pings cost nothing.
  set(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 1'000);
  set(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 2);
}

}  // namespace lossd::rpc
