// SPDX-License-Identifier: Apache-2.0
// Counts the caller's memory that gRPC still refers to. A call's end does not mean that the transport has
// written or dropped everything it was given, so the caller may not have his memory back before this is zero.
//
// Thread-safe.
#ifndef LOSSD_CLIENT_CPP_PAYLOAD_HOLDS_H_
#define LOSSD_CLIENT_CPP_PAYLOAD_HOLDS_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"

namespace lossd::client::internal {

class PayloadHolds : public std::enable_shared_from_this<PayloadHolds> {
 public:
  static std::shared_ptr<PayloadHolds> Create() { return std::make_shared<PayloadHolds>(); }

  // Takes a hold; calling the result gives it back. Never blocks.
  absl::AnyInvocable<void()> Take();

  // Runs `task` once there are no holds: at once, or on the thread that gives back the last one. The task
  // must not block. At most one task waits at a time.
  void WhenFree(absl::AnyInvocable<void()> task);

  // Whether there are none now.
  bool free() ABSL_LOCKS_EXCLUDED(mu_);

  // Blocks until there are no holds.
  void WaitUntilFree();

 private:
  void GiveBack();

  absl::Mutex mu_;
  int64_t held_ ABSL_GUARDED_BY(mu_) = 0;
  absl::AnyInvocable<void()> task_ ABSL_GUARDED_BY(mu_);
};

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_PAYLOAD_HOLDS_H_
