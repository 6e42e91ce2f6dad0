// SPDX-License-Identifier: Apache-2.0
// Calls on heads that were done last and that a client names, so that a repeat of one is recognised and gets the
// same answer.
//
// Thread-safe.
#ifndef LOSSD_SERVER_ADMIN_DONE_CALLS_H_
#define LOSSD_SERVER_ADMIN_DONE_CALLS_H_

#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "kernels/errors/field_error.h"

namespace lossd::admin {

// `Response`: what such a call is answered with.
template <typename Response>
class DoneCalls {
 public:
  static constexpr size_t kRemembered = 64;  // of each head

  // `id_field`: of the request, which has the id. `kind`: of the calls, for people: "reset".
  DoneCalls(std::string id_field, std::string kind) : id_field_(std::move(id_field)), kind_(std::move(kind)) {}

  // What the call of that id was answered with, if it is known. FAILED_PRECONDITION for the id's field if that
  // call asked for something else. `content`: of the request, apart from the id and from who is meant.
  absl::StatusOr<std::optional<Response>> Find(absl::string_view head, absl::string_view id,
                                               absl::string_view content) const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    const auto found = done_.find(head);
    if (found == done_.end()) return std::nullopt;
    for (const Done& done : found->second) {
      if (done.id != id) continue;
      if (done.content == content) return done.response;
      return errors::FieldError(
          id_field_, absl::StrCat("be another one for another ", kind_, ": this one has been done"), id,
          absl::StatusCode::kFailedPrecondition);
    }
    return std::nullopt;
  }
  void Add(absl::string_view head, absl::string_view id, std::string content, const Response& response)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    std::deque<Done>& done = done_[std::string(head)];
    done.push_back({std::string(id), std::move(content), response});
    if (done.size() > kRemembered) done.pop_front();
  }
  // The head was deleted.
  void Forget(absl::string_view head) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    if (const auto found = done_.find(head); found != done_.end()) done_.erase(found);
  }

 private:
  struct Done {
    std::string id;
    std::string content;
    Response response;
  };

  const std::string id_field_, kind_;
  mutable absl::Mutex mutex_;
  std::map<std::string, std::deque<Done>, std::less<>> done_ ABSL_GUARDED_BY(mutex_);  // by head, in order
};

}  // namespace lossd::admin

#endif  // LOSSD_SERVER_ADMIN_DONE_CALLS_H_
