// SPDX-License-Identifier: Apache-2.0
// The members of a group, one backend a device: the thread that drives one member (MemberThread), all members
// (Members), and the heads that the members have of one head of the group (MemberHeads).
#ifndef LOSSD_KERNELS_GROUP_MEMBERS_H_
#define LOSSD_KERNELS_GROUP_MEMBERS_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/backend.h"
#include "kernels/exchange_times.h"
#include "kernels/group/group_chunk.h"
#include "kernels/replica.h"

namespace lossd::kernels {

// The driving thread of one member, which calls the member's backend and heads. So members that compute while
// they are called, as CPUs do, work at the same time. Thread-safe.
class MemberThread {
 public:
  using Task = absl::AnyInvocable<void()>;

  // `max_chunks`: that the member takes at a time.
  MemberThread(int index, int max_chunks);
  // Runs what was posted, then ends.
  ~MemberThread();
  MemberThread(const MemberThread&) = delete;
  MemberThread& operator=(const MemberThread&) = delete;

  // Tasks run one after the other, in the order of their posting.
  void Post(Task task);

  // Called by a task: waits until the member takes another chunk. Chunks end without this thread's help.
  void StartChunk();
  // `rows`: that it had, or none if it has failed.
  void EndChunk(std::optional<int64_t> rows);

  MemberWork work() const;

 private:
  void Run(int index);

  const int max_chunks_;
  BusyClock busy_;
  mutable absl::Mutex mutex_;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  int chunks_ ABSL_GUARDED_BY(mutex_) = 0;  // that have started and not ended
  int64_t chunks_done_ ABSL_GUARDED_BY(mutex_) = 0, rows_done_ ABSL_GUARDED_BY(mutex_) = 0;
  std::thread thread_;
};

// The backends of a group and their threads. Driven by one thread, the group's driving thread, but for
// thread() and backend(), which are thread-safe.
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

// The heads that the members of a group have of one head, and the chunks that they compute together. Driven
// by the group's driving thread; the heads themselves are called on their members' threads.
class MemberHeads {
 public:
  // `heads`: one of each member. The members outlive it.
  MemberHeads(Members* members, std::vector<std::unique_ptr<HeadKernels>> heads)
      : members_(members), heads_(std::move(heads)) {}
  // No chunk may be under way.
  ~MemberHeads();
  MemberHeads(const MemberHeads&) = delete;
  MemberHeads& operator=(const MemberHeads&) = delete;

  int size() const { return static_cast<int>(heads_.size()); }
  HeadKernels& head(int member) const { return *heads_[static_cast<size_t>(member)]; }
  Members& members() const { return *members_; }
  // The fewest that a chunk of one of them may have.
  int64_t chunk_rows() const;
  MemoryBytes memory() const;  // of all
  // Those of all members, of a head that is divided so.
  std::vector<RemotePart> Remote(Split split) const;
  void PassBy(absl::Span<const int> ranks) const;

  // HeadKernels::CheckTeacher of each member's head, whose teacher is the member's head of those; both have
  // the same members.
  absl::Status CheckTeacher(const MemberHeads& teacher) const;
  // Computes a chunk in parts, or calls back with the refusal when its turn comes. `teacher`: the heads that
  // are Chunk::teacher of the parts, each of its member; null without one.
  void Submit(Chunk* chunk, ChunkCallbacks callbacks, std::vector<ChunkPart> parts,
              const MemberHeads* teacher = nullptr);
  void Refuse(absl::Status refusal, ChunkCallbacks callbacks);
  void WaitUntilIdle() const { order_->WaitUntilIdle(); }

  // Calls `fn` for each member on its thread, at the same time. The first error in the order of the members.
  absl::Status ForEach(absl::FunctionRef<absl::Status(int member, HeadKernels& head)> fn) const;

  // ---- Of all members, each of which has some of the gradients; no chunk may be under way ----
  absl::Status CheckTrainable() const;
  // Of the gradients of all members together.
  absl::StatusOr<double> GradNorm() const;
  absl::Status ApplyStep(const OptimizerOptions& options, int64_t update) const;
  absl::Status ZeroGradients() const;
  absl::Status ZeroMoments() const;

 private:
  void Start(const std::shared_ptr<GroupChunk>& chunk, size_t part);

  Members* const members_;
  std::vector<std::unique_ptr<HeadKernels>> heads_;
  const std::shared_ptr<ChunkOrder> order_ = std::make_shared<ChunkOrder>();
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_GROUP_MEMBERS_H_
