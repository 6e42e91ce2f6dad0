// SPDX-License-Identifier: Apache-2.0
// How a client connects: the channels that it opens with its credentials, the first call on each of them,
// which finds out whether a lossd is there, and the error that says what is there if not.
//
// Functions are stateless and thread-safe.
#ifndef LOSSD_CLIENT_CPP_CONNECTING_H_
#define LOSSD_CLIENT_CPP_CONNECTING_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "client/cpp/client_options.h"
#include "client/cpp/probe.h"
#include "lossd/v1/server.pb.h"

namespace lossd::client::internal {

// The client's own view of Credentials, of which this is the only kind. Thread-safe.
class ChannelCredentials final : public Credentials {
 public:
  // `pem`: the contents of the files that `options` names.
  ChannelCredentials(CredentialOptions options, CredentialOptions pem)
      : options_(std::move(options)), pem_(std::move(pem)) {}

  // INVALID_ARGUMENT if a token would go to another host in the clear.
  absl::Status CheckTarget(const std::string& target) const;
  std::shared_ptr<grpc::Channel> Open(const std::string& target,
                                      const grpc::ChannelArguments& arguments) const;
  // Why no connection to `target` comes about (Explain in connecting.h); OK: nothing was found, so that a
  // server that has not answered may be busy. Connects to it once or twice, which takes some seconds at most.
  absl::Status Diagnose(const std::string& target) const;

 private:
  bool has_tls() const { return !options_.ca.empty(); }

  const CredentialOptions options_;
  const CredentialOptions pem_;
};

// The error that a finding at `target` means, in words that say what to do; OK for kUnknown. UNAVAILABLE if
// no server is there, which may change; FAILED_PRECONDITION and UNAUTHENTICATED for what waiting cannot mend.
// `options`: what the client was given. tests/client/golden/connecting.json has cases that the Python client
// shares (client/python/src/lossd/_diagnosis.py).
absl::Status Explain(const Finding& finding, const std::string& target, const CredentialOptions& options);

// UNAVAILABLE: there is no server at `target`, because of `why`, a sentence without its full stop, or "".
absl::Status NoServerError(const std::string& target, absl::string_view why);

// Waits until the server has answered on this channel. UNAVAILABLE if nobody is there: at once, unless
// options.wait_for_server. What waiting cannot mend (TLS on one side only, another program, ...) is returned
// at once in any case. A server that takes connections but says nothing may be busy, so it has until the
// deadline. The description is empty if the server does not know this client, or gives it no role.
absl::StatusOr<v1::ServerDescription> AwaitServer(const std::shared_ptr<grpc::Channel>& channel,
                                                  const ChannelCredentials& credentials,
                                                  const ClientOptions& options, absl::Time deadline);

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_CONNECTING_H_
