// SPDX-License-Identifier: Apache-2.0
// HeadOperations::SetShares.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/admin/head_operations.h"
#include "server/log/log.h"
#include "server/messages/convert.h"
#include "server/messages/texts.h"

namespace lossd::admin {

absl::StatusOr<v1::SetSharesResponse> HeadOperations::SetShares(const v1::SetSharesRequest& request) {
  if (absl::Status status = messages::CheckCallId("change_id", request.change_id()); !status.ok()) return status;
  if (request.has_incarnation()) {
    absl::Status status =
        messages::CheckIncarnation("incarnation", request.incarnation(), engine_->incarnation());
    if (!status.ok()) return status;
  }
  const absl::StatusOr<std::vector<int32_t>> shares = messages::ToShares(request.shares(), "shares");
  if (!shares.ok()) return shares.status();
  const NamedLocks::Guard guard = locks_.Lock(request.head());
  absl::StatusOr<v1::HeadDescription> description = Description(request.head());
  if (!description.ok()) return description.status();
  const std::string content = absl::StrJoin(*shares, ",");
  absl::StatusOr<std::optional<v1::SetSharesResponse>> done =
      divisions_.Find(request.head(), request.change_id(), content);
  if (!done.ok()) return done.status();
  if (done->has_value()) {
    (*done)->set_repeated_call(true);
    return **std::move(done);
  }
  if (absl::Status status = engine_->SetShares(request.head(), *shares); !status.ok()) return status;
  const std::string before = absl::StrJoin(description->spec().shares(), ",");
  description = Description(request.head());
  if (!description.ok()) return description.status();
  const auto text = [](const std::string& list) { return list.empty() ? std::string("even") : list; };
  metrics_->events().Add(metrics::EventLevel::kInfo, "shares_set", request.head(),
                         absl::StrCat("shares of the devices: ", text(content), ", before: ", text(before)));
  log::Log(log::LogLevel::kInfo, "shares set",
           {{"head", request.head()}, {"shares", text(content)}, {"before", text(before)}});
  v1::SetSharesResponse response;
  *response.mutable_head() = *std::move(description);
  divisions_.Add(request.head(), request.change_id(), content, response);
  return response;
}

}  // namespace lossd::admin
