// SPDX-License-Identifier: Apache-2.0
// The members of a group: one backend a device, each with a thread that drives it.
//
// Driven by one thread, the group's driving thread, but for threads() and backends(), which are thread-safe.
#ifndef LOSSD_KERNELS_GROUP_MEMBERS_H_
#define LOSSD_KERNELS_GROUP_MEMBERS_H_

#include <functional>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kernels/backend.h"
#include "kernels/group/member_thread.h"

namespace lossd::kernels {

class Members {
 public:
  // `check`: GroupOptions::check_members.
  Members(std::vector<std::unique_ptr<Backend>> backends, std::function<absl::Status()> check);

  // Whether chunks may be computed.
  absl::Status Check() const { return check_(); }

  int size() const { return static_cast<int>(backends_.size()); }
  Backend& backend(int member) const { return *backends_[static_cast<size_t>(member)]; }
  MemberThread& thread(int member) const { return *threads_[static_cast<size_t>(member)]; }

  // Calls `fn` for each member on its thread, at the same time, and waits. The first error in the order of
  // the members.
  absl::Status ForEach(absl::FunctionRef<absl::Status(int member)> fn) const;
  // The same for one member.
  absl::Status On(int member, absl::FunctionRef<absl::Status()> fn) const;
  // Calls `fn` here while no thread of a member does anything.
  absl::Status WithAll(absl::FunctionRef<absl::Status()> fn) const;

 private:
  const std::vector<std::unique_ptr<Backend>> backends_;
  const std::function<absl::Status()> check_;
  std::vector<std::unique_ptr<MemberThread>> threads_;  // end before the backends
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_GROUP_MEMBERS_H_
