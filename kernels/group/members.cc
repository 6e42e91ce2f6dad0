// SPDX-License-Identifier: Apache-2.0
#include "kernels/group/members.h"

#include <utility>

#include "absl/synchronization/notification.h"

namespace lossd::kernels {

Members::Members(std::vector<std::unique_ptr<Backend>> backends, std::function<absl::Status()> check)
    : backends_(std::move(backends)), check_(std::move(check)) {
  for (int i = 0; i < size(); ++i) {
    threads_.push_back(std::make_unique<MemberThread>(i, backend(i).max_chunks_in_flight()));
  }
}

absl::Status Members::ForEach(absl::FunctionRef<absl::Status(int member)> fn) const {
  std::vector<absl::Status> results(static_cast<size_t>(size()));
  std::vector<absl::Notification> done(results.size());
  for (int i = 0; i < size(); ++i) {
    thread(i).Post([&, i] {
      results[static_cast<size_t>(i)] = fn(i);
      done[static_cast<size_t>(i)].Notify();
    });
  }
  for (absl::Notification& one : done) one.WaitForNotification();
  absl::Status first;
  for (absl::Status& result : results) first.Update(std::move(result));
  return first;
}

absl::Status Members::On(int member, absl::FunctionRef<absl::Status()> fn) const {
  absl::Status result;
  absl::Notification done;
  thread(member).Post([&] {
    result = fn();
    done.Notify();
  });
  done.WaitForNotification();
  return result;
}

absl::Status Members::WithAll(absl::FunctionRef<absl::Status()> fn) const {
  std::vector<absl::Notification> waiting(threads_.size());
  std::vector<absl::Notification> done(threads_.size());
  absl::Notification go_on;
  for (int i = 0; i < size(); ++i) {
    thread(i).Post([&, i] {
      waiting[static_cast<size_t>(i)].Notify();
      go_on.WaitForNotification();
      done[static_cast<size_t>(i)].Notify();
    });
  }
  for (absl::Notification& one : waiting) one.WaitForNotification();
  absl::Status result = fn();
  go_on.Notify();
  for (absl::Notification& one : done) one.WaitForNotification();
  return result;
}

}  // namespace lossd::kernels
