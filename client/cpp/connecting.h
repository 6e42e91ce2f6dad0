// SPDX-License-Identifier: Apache-2.0
// The first call on each connection of a client: whether a lossd is there, and what is there if not.
//
// Stateless and thread-safe.
#ifndef LOSSD_CLIENT_CPP_CONNECTING_H_
#define LOSSD_CLIENT_CPP_CONNECTING_H_

#include <grpcpp/grpcpp.h>

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/channel_credentials.h"
#include "client/cpp/client.h"
#include "lossd/v1/server.pb.h"

namespace lossd::client::internal {

// Waits until the server has answered on this channel. UNAVAILABLE if nobody is there: at once, unless
// options.wait_for_server. What waiting cannot mend (TLS on one side only, another program, ...) is returned
// at once in any case. A server that takes connections but says nothing may be busy, so it has until the
// deadline. The description is empty if the server does not know this client, or gives it no role.
absl::StatusOr<v1::ServerDescription> AwaitServer(const std::shared_ptr<grpc::Channel>& channel,
                                                  const ChannelCredentials& credentials,
                                                  const ClientOptions& options, absl::Time deadline);

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_CONNECTING_H_
