// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/connecting.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/diagnosis.h"
#include "client/cpp/peer.h"
#include "client/cpp/probe.h"
#include "client/cpp/retry.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/payload.h"
#include "lossd/v1/server.grpc.pb.h"
#include "proto/wire/deadlines.h"
#include "proto/wire/status_details.h"

namespace lossd::client::internal {
namespace {

// Before the reason for a silence is looked for.
constexpr absl::Duration kSilencePatience = absl::Milliseconds(500);
constexpr absl::Duration kRound = absl::Seconds(5);         // before the next looks
constexpr absl::Duration kPause = absl::Milliseconds(200);  // before the next call

absl::StatusOr<v1::ServerDescription> Ask(const std::shared_ptr<grpc::Channel>& channel, absl::Time deadline,
                                          bool wait_for_ready) {
  grpc::ClientContext context;
  context.set_deadline(wire::GrpcTime(deadline));
  context.set_wait_for_ready(wait_for_ready);
  v1::ServerDescription description;
  const grpc::Status status =
      v1::ServerService::NewStub(channel)->GetServer(&context, v1::GetServerRequest(), &description);
  if (!status.ok()) return wire::FromGrpcStatus(status);
  return description;
}

// An error of the first call that says who is there.
absl::Status Refusal(const absl::Status& status, const std::string& target) {
  if (absl::IsUnimplemented(status)) {
    return absl::UnimplementedError(absl::StrCat(
        "the gRPC server at ", target, " does not know lossd.v1, the protocol of this client (lossd ",
        ClientVersion(), "): it is another program, or a lossd of another version (", status.message(), ")"));
  }
  return status;
}

// Whether the server lets this client see nothing of it.
bool KnowsNot(const absl::Status& status) {
  return absl::IsUnauthenticated(status) || absl::IsPermissionDenied(status);
}

// Whether another call may end otherwise.
bool MayPass(const absl::Status& status) { return IsTransient(status) || absl::IsDeadlineExceeded(status); }

// `reason`: what was found last; OK: nothing.
absl::Status GaveUp(const absl::Status& reason, const ClientOptions& options) {
  const std::string waited = absl::FormatDuration(options.connect_timeout);
  if (!reason.ok()) {
    return errors::WithMessage(reason, absl::StrCat(reason.message(), "; waited ", waited));
  }
  return absl::UnavailableError(
      absl::StrCat("the server at ", options.target, CanProbe(options.target) ? " takes connections but" : "",
                   " has not answered within ", waited, ": it is busy, or it is another program than lossd"));
}

// Why a call ended with `status`, as far as it can be found out. OK: nothing was found, and it may be sent
// again.
absl::Status Reason(const absl::Status& status, bool first, const ChannelCredentials& credentials,
                    const std::string& target) {
  absl::Status reason = credentials.Diagnose(target);
  // An error of the first call may be one of the connection, and of a server that has come up meanwhile.
  const bool tells = absl::IsUnavailable(status) && !(first && CanProbe(target));
  return reason.ok() && tells ? NoServerError(target, status.message()) : reason;
}

}  // namespace

absl::StatusOr<v1::ServerDescription> AwaitServer(const std::shared_ptr<grpc::Channel>& channel,
                                                  const ChannelCredentials& credentials,
                                                  const ClientOptions& options, absl::Time deadline) {
  for (bool first = true;; first = false) {
    const absl::Time end = std::min(deadline, clocks::SteadyNow() + (first ? kSilencePatience : kRound));
    absl::StatusOr<v1::ServerDescription> server = Ask(channel, end, /*wait_for_ready=*/!first);
    if (server.ok()) return server;
    // A server that tells nothing to this client may still say whether it serves; other calls will say why.
    if (KnowsNot(server.status()) && options.expected_incarnation == 0) return v1::ServerDescription();
    if (!MayPass(server.status())) return Refusal(server.status(), options.target);
    const absl::Status reason = Reason(server.status(), first, credentials, options.target);
    const bool waits = reason.ok() || (absl::IsUnavailable(reason) && options.wait_for_server);
    if (!waits) return reason;
    if (clocks::SteadyNow() >= deadline) return GaveUp(reason, options);
    absl::SleepFor(std::min(kPause, deadline - clocks::SteadyNow()));
  }
}

}  // namespace lossd::client::internal
