// SPDX-License-Identifier: Apache-2.0
// The resets of heads that were done last (done_calls.h).
//
// Thread-safe.
#ifndef LOSSD_SERVER_ADMIN_RESET_LOG_H_
#define LOSSD_SERVER_ADMIN_RESET_LOG_H_

#include <cstddef>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "lossd/v1/head.pb.h"
#include "server/admin/done_calls.h"

namespace lossd::admin {

class ResetLog {
 public:
  static constexpr size_t kRemembered = DoneCalls<v1::ResetHeadResponse>::kRemembered;  // of each head

  // As DoneCalls::Find, for the field "reset_id".
  absl::StatusOr<std::optional<v1::ResetHeadResponse>> Find(const v1::ResetHeadRequest& request) const;
  void Add(const v1::ResetHeadRequest& request, const v1::ResetHeadResponse& response);
  // The head was deleted.
  void Forget(absl::string_view head) { done_.Forget(head); }

 private:
  DoneCalls<v1::ResetHeadResponse> done_{"reset_id", "reset"};
};

}  // namespace lossd::admin

#endif  // LOSSD_SERVER_ADMIN_RESET_LOG_H_
