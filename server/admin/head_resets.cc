// SPDX-License-Identifier: Apache-2.0
// HeadOperations::ResetHead.
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "kernels/errors/field_error.h"
#include "server/admin/head_operations.h"
#include "server/messages/convert.h"
#include "server/messages/errors.h"
#include "server/messages/texts.h"

namespace lossd::admin {
namespace {

absl::Status CheckReset(const v1::ResetHeadRequest& request, uint64_t incarnation) {
  if (absl::Status status = messages::CheckCallId("reset_id", request.reset_id()); !status.ok())
    return status;
  if (request.scope() != v1::RESET_SCOPE_OPTIMIZER && request.scope() != v1::RESET_SCOPE_ALL) {
    return errors::FieldError("scope", "be RESET_SCOPE_OPTIMIZER or RESET_SCOPE_ALL",
                              static_cast<int>(request.scope()));
  }
  const bool names_values = request.init_case() != v1::ResetHeadRequest::INIT_NOT_SET;
  if (names_values && request.scope() != v1::RESET_SCOPE_ALL) {
    return errors::FieldError("init", "come with RESET_SCOPE_ALL only", "values with RESET_SCOPE_OPTIMIZER");
  }
  if (!request.has_incarnation()) return absl::OkStatus();
  return messages::CheckIncarnation("incarnation", request.incarnation(), incarnation);
}

}  // namespace

absl::StatusOr<v1::ResetHeadResponse> HeadOperations::ResetHead(const v1::ResetHeadRequest& request) {
  const absl::Cleanup end_reading = [this] { checkpoints_.EndReading(); };
  if (absl::Status status = CheckReset(request, engine_->incarnation()); !status.ok()) return status;
  const NamedLocks::Guard guard = locks_.Lock(request.head());
  const absl::StatusOr<engine::HeadSnapshot> head = engine_->Describe(request.head());
  if (!head.ok()) return head.status();
  absl::StatusOr<std::optional<v1::ResetHeadResponse>> done = resets_.Find(request);
  if (!done.ok()) return done.status();
  if (done->has_value()) {
    (*done)->set_repeated_call(true);
    return **std::move(done);
  }
  if (absl::Status status = ResetInTurn(request, *head); !status.ok()) return status;
  absl::StatusOr<v1::HeadDescription> description = Description(request.head());
  if (!description.ok()) return description.status();
  const bool all = request.scope() == v1::RESET_SCOPE_ALL;
  LogHead(all ? "head_reset" : "optimizer_reset", *description);
  v1::ResetHeadResponse response;
  *response.mutable_head() = *std::move(description);
  resets_.Add(request, response);
  return response;
}

absl::Status HeadOperations::ResetInTurn(const v1::ResetHeadRequest& request,
                                         const engine::HeadSnapshot& head) {
  if (request.scope() == v1::RESET_SCOPE_OPTIMIZER) {
    return engine_->Reset(head.name, engine::ResetScope::kOptimizer).status();
  }
  if (request.has_tensor_file()) {
    if (absl::Status status = checkpoints_.PrepareDirectory(); !status.ok()) return status;
  }
  const absl::StatusOr<InitialValues> values =
      InitialValues::Open(options_.checkpoints.directory, request, head.config);
  if (!values.ok()) return values.status();
  // What cannot be read is known before anything is written.
  if (absl::Status status = values->CheckReadable(options_.transfer_bytes); !status.ok()) return status;
  absl::Status status = engine_->Reset(head.name, engine::ResetScope::kAll).status();
  if (status.ok()) status = FillHead(head.name, *values, /*used=*/true);
  return status.ok() ? engine_->EndLoad(head.name) : status;
}

}  // namespace lossd::admin
