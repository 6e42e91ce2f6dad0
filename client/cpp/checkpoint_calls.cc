// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/checkpoint_calls.h"

#include <optional>
#include <string>
#include <utility>

#include "client/cpp/client.h"
#include "client/cpp/connections.h"
#include "client/cpp/core.h"
#include "client/cpp/run_name.h"
#include "client/cpp/unary_call.h"

namespace lossd::client {
namespace {

using internal::Call;
using internal::DeadlineAfter;
using internal::kNever;
using internal::Repeat;

}  // namespace

absl::StatusOr<v1::SaveCheckpointResponse> CheckpointCalls::SaveCheckpoint(absl::string_view head,
                                                                           absl::string_view name,
                                                                           absl::Duration timeout) {
  v1::SaveCheckpointRequest request;
  request.set_head(std::string(head));
  request.set_name(std::string(name));
  return SaveCheckpoint(request, nullptr, timeout);
}

absl::StatusOr<v1::SaveCheckpointResponse> CheckpointCalls::SaveCheckpoint(
    const v1::SaveCheckpointRequest& request, const std::function<void(const v1::SaveProgress&)>& on_progress,
    absl::Duration timeout) {
  grpc::ClientContext context;
  internal::SetDeadline(DeadlineAfter(timeout, calls_core_->options().transfer_timeout), &context);
  const auto reader = calls_core_->connections().heads()->SaveCheckpoint(&context, request);
  std::optional<v1::SaveCheckpointResponse> saved;
  v1::SaveCheckpointUpdate update;
  while (reader->Read(&update)) {
    if (update.has_progress() && on_progress != nullptr) on_progress(update.progress());
    if (update.has_saved()) saved = std::move(*update.mutable_saved());
  }
  absl::Status status = internal::CallStatus(reader->Finish(), calls_core_->connections().peer());
  if (!status.ok()) return status;
  if (!saved.has_value()) return absl::InternalError("the server did not say what it saved");
  return *std::move(saved);
}

absl::StatusOr<v1::ListCheckpointsResponse> CheckpointCalls::ListCheckpoints(absl::string_view head,
                                                                             absl::Duration timeout) {
  v1::ListCheckpointsRequest request;
  request.set_head(std::string(head));
  return Call(*calls_core_, calls_core_->connections().heads(), &v1::HeadService::Stub::ListCheckpoints,
              request, DeadlineAfter(timeout, calls_core_->options().call_timeout), Repeat::kIfTransient);
}

absl::StatusOr<v1::HeadDescription> CheckpointCalls::LoadCheckpoint(absl::string_view checkpoint,
                                                                    absl::string_view head,
                                                                    absl::Duration timeout) {
  v1::LoadCheckpointRequest request;
  request.set_checkpoint(std::string(checkpoint));
  request.set_head(std::string(head));
  auto result = Call(*calls_core_, calls_core_->connections().heads(), &v1::HeadService::Stub::LoadCheckpoint,
                     request, DeadlineAfter(timeout, calls_core_->options().transfer_timeout), kNever);
  if (result.ok()) {
    calls_core_->head_cache().Learn(*result);
    calls_core_->head_cache().ForgetAccumulation(result->spec().name());
  }
  return result;
}

absl::StatusOr<v1::DeleteCheckpointResponse> CheckpointCalls::DeleteCheckpoint(absl::string_view checkpoint,
                                                                               absl::Duration timeout) {
  v1::DeleteCheckpointRequest request;
  request.set_checkpoint(std::string(checkpoint));
  request.set_deletion_id(internal::RandomDigits(32));
  return Call(*calls_core_, calls_core_->connections().heads(), &v1::HeadService::Stub::DeleteCheckpoint,
              request, DeadlineAfter(timeout, calls_core_->options().transfer_timeout), Repeat::kIfTransient);
}

}  // namespace lossd::client
