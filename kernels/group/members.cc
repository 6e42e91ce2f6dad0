#include "kernels/group/members.h"

#include <utility>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"

namespace lossd::kernels {

Members::Members(std::vector<std::unique_ptr<Backend>> backends) : backends_(std::move(backends)) {
  for (int i = 0; i < size(); ++i) {
    threads_.push_back(std::make_unique<MemberThread>(i, backend(i).max_chunks_in_flight()));
  }
}

absl::Status Members::ForEach(absl::FunctionRef<absl::Status(int member)> fn) const {
  std::vector<absl::Status> results(static_cast<size_t>(size()));
  absl::BlockingCounter left(size());
  for (int i = 0; i < size(); ++i) {
    thread(i).Post([&, i] {
      results[static_cast<size_t>(i)] = fn(i);
      left.DecrementCount();
    });
  }
  left.Wait();
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
  absl::BlockingCounter waiting(size());
  absl::BlockingCounter left(size());
  absl::Notification go_on;
  for (int i = 0; i < size(); ++i) {
    thread(i).Post([&] {
      waiting.DecrementCount();
      go_on.WaitForNotification();
      left.DecrementCount();
    });
  }
  waiting.Wait();
  absl::Status result = fn();
  go_on.Notify();
  left.Wait();
  return result;
}

}  // namespace lossd::kernels
