// SPDX-License-Identifier: Apache-2.0
// Calls with one request and one response, repeated as far as they may be. Thread-safe.
#ifndef LOSSD_CLIENT_CPP_UNARY_CALL_H_
#define LOSSD_CLIENT_CPP_UNARY_CALL_H_

#include <grpcpp/client_context.h>
#include <grpcpp/support/status.h>

#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/connections.h"
#include "client/cpp/core.h"
#include "client/cpp/retry.h"
#include "kernels/clocks/clock.h"

namespace lossd::client::internal {

// Of a call that is not repeated.
inline constexpr std::optional<Repeat> kNever;

// A `timeout` of zero means `fallback`.
inline absl::Time DeadlineAfter(absl::Duration timeout, absl::Duration fallback) {
  return clocks::SteadyNow() + (timeout > absl::ZeroDuration() ? timeout : fallback);
}

// Runs `attempt`, which returns a StatusOr, until it succeeds or may not be repeated, waiting in between.
template <typename Attempt>
auto Repeated(const Core& core, absl::Time deadline, Repeat repeat, Attempt attempt) -> decltype(attempt()) {
  for (int number = 1;; ++number) {
    auto result = attempt();
    if (result.ok()) return result;
    const auto wait = WaitBeforeRepeat(core.options().retry, result.status(), number,
                                       deadline - clocks::SteadyNow(), Jitter(), repeat);
    if (!wait.has_value()) return WithAttempts(result.status(), number);
    absl::SleepFor(*wait);
  }
}

// One unary call, repeated if allowed; nullopt: never.
template <typename Stub, typename Request, typename Response>
absl::StatusOr<Response> Call(const Core& core, Stub* stub,
                              grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                              const Request& request, absl::Time deadline, std::optional<Repeat> repeat) {
  const auto attempt = [&]() -> absl::StatusOr<Response> {
    grpc::ClientContext context;
    SetDeadline(deadline, &context);
    Response response;
    absl::Status status =
        CallStatus((stub->*method)(&context, request, &response), core.connections().peer());
    if (!status.ok()) return status;
    return response;
  };
  return repeat.has_value() ? Repeated(core, deadline, *repeat, attempt) : attempt();
}

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_UNARY_CALL_H_
