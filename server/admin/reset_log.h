// SPDX-License-Identifier: Apache-2.0
// The resets of heads that were done last, so that a repeat of one is recognised and gets the same answer.
//
// Thread-safe.
#ifndef LOSSD_SERVER_ADMIN_RESET_LOG_H_
#define LOSSD_SERVER_ADMIN_RESET_LOG_H_

#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "lossd/v1/head.pb.h"

namespace lossd::admin {

class ResetLog {
 public:
  static constexpr size_t kRemembered = 64;  // of each head

  // What the reset of that id was answered with, if the log has it. FAILED_PRECONDITION for the field
  // "reset_id" if that was a reset to something else.
  absl::StatusOr<std::optional<v1::ResetHeadResponse>> Find(const v1::ResetHeadRequest& request) const
      ABSL_LOCKS_EXCLUDED(mutex_);
  void Add(const v1::ResetHeadRequest& request, const v1::ResetHeadResponse& response)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The head was deleted.
  void Forget(absl::string_view head) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Done {
    std::string id;
    std::string content;  // of the request, apart from the id and from who is meant
    v1::ResetHeadResponse response;
  };

  mutable absl::Mutex mutex_;
  std::map<std::string, std::deque<Done>, std::less<>> done_ ABSL_GUARDED_BY(mutex_);  // by head, in order
};

}  // namespace lossd::admin

#endif  // LOSSD_SERVER_ADMIN_RESET_LOG_H_
