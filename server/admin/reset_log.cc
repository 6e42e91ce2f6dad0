// SPDX-License-Identifier: Apache-2.0
#include "server/admin/reset_log.h"

#include <string>

namespace lossd::admin {
namespace {

// Two requests of one content ask for the same.
std::string ContentOf(const v1::ResetHeadRequest& request) {
  v1::ResetHeadRequest content = request;
  content.clear_head();
  content.clear_reset_id();
  content.clear_incarnation();
  content.DiscardUnknownFields();
  const bool names_values = content.init_case() != v1::ResetHeadRequest::INIT_NOT_SET;
  if (content.scope() == v1::RESET_SCOPE_ALL && !names_values) content.mutable_kaiming_uniform();
  return content.SerializeAsString();
}

}  // namespace

absl::StatusOr<std::optional<v1::ResetHeadResponse>> ResetLog::Find(
    const v1::ResetHeadRequest& request) const {
  return done_.Find(request.head(), request.reset_id(), ContentOf(request));
}

void ResetLog::Add(const v1::ResetHeadRequest& request, const v1::ResetHeadResponse& response) {
  done_.Add(request.head(), request.reset_id(), ContentOf(request), response);
}

}  // namespace lossd::admin
