// SPDX-License-Identifier: Apache-2.0
// What both ends of the ranks' connection agree on: sizes of messages, how soon a silent end counts as lost,
// and the secret that admits a rank.
//
// Stateless; thread-safe.
#ifndef LOSSD_SERVER_RANKS_CHANNEL_H_
#define LOSSD_SERVER_RANKS_CHANNEL_H_

#include <grpcpp/server_builder.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/channel_arguments.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace lossd::ranks {

struct ChannelLimits {
  int64_t slice_bytes = 0;  // the most bytes of a slice's hidden states
  // An end that answers no ping for so long is lost.
  absl::Duration silence = absl::Seconds(30);
};

// The largest message: a slice with all that its rows may have, or a row of a tensor.
int64_t MaxMessageBytes(const ChannelLimits& limits);

void Configure(const ChannelLimits& limits, grpc::ServerBuilder* builder);
grpc::ChannelArguments ArgumentsOf(const ChannelLimits& limits);

// A random name that nobody has yet, for an abstract Unix socket where a leader takes workers of its own
// process, since gRPC's channel within a process ends the program when a call begins while the server ends.
std::string NewLocalName();

// The secret travels as metadata. UNAUTHENTICATED if it is not this one; the time does not depend on where
// they differ. An empty secret admits everybody.
void AddSecret(const std::string& secret, grpc::ClientContext* context);
absl::Status CheckSecret(const std::string& secret, const grpc::ServerContext& context);

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_CHANNEL_H_
