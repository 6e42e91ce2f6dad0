// SPDX-License-Identifier: Apache-2.0
// Channels with the client's credentials.
#ifndef LOSSD_CLIENT_CPP_CHANNEL_CREDENTIALS_H_
#define LOSSD_CLIENT_CPP_CHANNEL_CREDENTIALS_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "client/cpp/credentials.h"

namespace lossd::client::internal {

// What the client makes of Credentials: every kind derives from this. Thread-safe.
class ChannelCredentials : public Credentials {
 public:
  // INVALID_ARGUMENT if a token would go to another host in the clear.
  virtual absl::Status CheckTarget(const std::string& target) const = 0;
  virtual std::shared_ptr<grpc::Channel> Open(const std::string& target,
                                              const grpc::ChannelArguments& arguments) const = 0;
  // Why no connection to `target` comes about (Explain in diagnosis.h); OK: nothing was found, so that a
  // server that has not answered may be busy. Connects to it once or twice, which takes some seconds at most.
  virtual absl::Status Diagnose(const std::string& target) const = 0;
};

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_CHANNEL_CREDENTIALS_H_
