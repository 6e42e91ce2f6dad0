// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/status.h"

#include <utility>

#include "proto/wire/status_details.h"
#include "server/engine/staging.h"
#include "server/messages/texts.h"

namespace lossd::rpc {

grpc::Status ToGrpc(absl::Status status, uint64_t incarnation) {
  if (status.ok()) return grpc::Status::OK;
  return wire::ToGrpcStatus(messages::WithDetail(std::move(status), incarnation));
}

grpc::Status CountedEnd(absl::string_view method, absl::Status status, uint64_t incarnation,
                        metrics::Metrics* metrics) {
  const std::string limit = engine::LimitOf(status);
  grpc::Status result = ToGrpc(std::move(status), incarnation);
  if (!result.ok()) metrics->CountError(method, CodeName(result));
  if (!limit.empty()) metrics->CountLimit(limit);
  return result;
}

std::string CodeName(const grpc::Status& status) {
  return absl::StatusCodeToString(static_cast<absl::StatusCode>(status.error_code()));
}

}  // namespace lossd::rpc
