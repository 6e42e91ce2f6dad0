// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/monitoring.h"

#include <string>

#include "client/cpp/connections.h"
#include "client/cpp/core.h"
#include "client/cpp/unary_call.h"

namespace lossd::client {

using internal::Call;
using internal::DeadlineAfter;
using internal::Repeat;

absl::StatusOr<v1::ListStreamsResponse> MonitoringCalls::ListStreams(uint32_t max_streams,
                                                                     absl::Duration timeout) const {
  v1::ListStreamsRequest request;
  request.set_max_streams(max_streams);
  return Call(*core_, core_->connections().server(), &v1::ServerService::Stub::ListStreams, request,
              DeadlineAfter(timeout, core_->options().call_timeout), Repeat::kIfTransient);
}

absl::StatusOr<Health> MonitoringCalls::CheckHealth(absl::string_view service, absl::Duration timeout) const {
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(std::string(service));
  auto result = Call(*core_, core_->connections().health(), &grpc::health::v1::Health::Stub::Check, request,
                     DeadlineAfter(timeout, core_->options().call_timeout), internal::kNever);
  if (absl::IsNotFound(result.status())) return Health::kUnknownService;
  if (!result.ok()) return result.status();
  return result->status() == grpc::health::v1::HealthCheckResponse::SERVING ? Health::kServing
                                                                            : Health::kNotServing;
}

}  // namespace lossd::client
