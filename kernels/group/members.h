// SPDX-License-Identifier: Apache-2.0
// The members of a group (group_backend.h). A member is the backend of one device. Members has all members of
// a group. MemberThread is the thread that drives one member. MemberHeads has the heads that the members have
// for one head of the group.
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

// The driving thread of one member: it calls the member's backend and heads. Because each member has its own
// thread, members whose calls compute, as the calls of a CPU backend do, work at the same time. Thread-safe.
class MemberThread {
 public:
  using Task = absl::AnyInvocable<void()>;

  // `max_chunks`: the most chunks that the member takes at a time.
  MemberThread(int index, int max_chunks);
  // Runs the posted tasks, then ends the thread.
  ~MemberThread();
  MemberThread(const MemberThread&) = delete;
  MemberThread& operator=(const MemberThread&) = delete;

  // Queues a task. Tasks run one after the other, in the order of Post.
  void Post(Task task);

  // Called by a task before it submits a chunk: waits until the member takes another chunk. Other threads
  // call EndChunk.
  void StartChunk();
  // A chunk has ended. `rows`: the number of its rows; nullopt if it failed.
  void EndChunk(std::optional<int64_t> rows);

  MemberWork work() const;

 private:
  void Run(int index);

  const int max_chunks_;
  BusyClock busy_;
  mutable absl::Mutex mutex_;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  int chunks_ ABSL_GUARDED_BY(mutex_) = 0;  // chunks started and not ended
  int64_t chunks_done_ ABSL_GUARDED_BY(mutex_) = 0, rows_done_ ABSL_GUARDED_BY(mutex_) = 0;
  std::thread thread_;
};

// The backends of a group and their threads. Used by the group's driving thread only, except thread() and
// backend(), which are thread-safe.
class Members {
 public:
  // `check`: GroupOptions::check_members.
  Members(std::vector<std::unique_ptr<Backend>> backends, std::function<absl::Status()> check);

  // OK if chunks may be computed (GroupOptions::check_members).
  absl::Status Check() const { return check_(); }

  int size() const { return static_cast<int>(backends_.size()); }
  Backend& backend(int member) const { return *backends_[static_cast<size_t>(member)]; }
  MemberThread& thread(int member) const { return *threads_[static_cast<size_t>(member)]; }

  // Calls `fn` for all members at the same time, each on its thread, and waits. Returns the first error in
  // the order of the members.
  absl::Status ForEach(absl::FunctionRef<absl::Status(int member)> fn) const;
  // Calls `fn` on the thread of one member, and waits.
  absl::Status On(int member, absl::FunctionRef<absl::Status()> fn) const;
  // Calls `fn` on this thread while all members' threads wait.
  absl::Status WithAll(absl::FunctionRef<absl::Status()> fn) const;

 private:
  const std::vector<std::unique_ptr<Backend>> backends_;
  const std::function<absl::Status()> check_;
  std::vector<std::unique_ptr<MemberThread>> threads_;  // destroyed before the backends
};

// The heads that the members have for one head of the group, and the chunks that these heads compute
// together. Used by the group's driving thread; it calls each head on the thread of the head's member.
class MemberHeads {
 public:
  // `heads`: one for each member. The members outlive this object.
  MemberHeads(Members* members, std::vector<std::unique_ptr<HeadKernels>> heads)
      : members_(members), heads_(std::move(heads)) {}
  // No chunk may be in flight.
  ~MemberHeads();
  MemberHeads(const MemberHeads&) = delete;
  MemberHeads& operator=(const MemberHeads&) = delete;

  int size() const { return static_cast<int>(heads_.size()); }
  HeadKernels& head(int member) const { return *heads_[static_cast<size_t>(member)]; }
  Members& members() const { return *members_; }
  // The smallest slice_rows() of the heads.
  int64_t chunk_rows() const;
  MemoryBytes memory() const;  // sum over all heads
  // The remote parts of all members, for a head that is divided by `split`.
  std::vector<RemotePart> Remote(Split split) const;
  void SkipWritesTo(absl::Span<const int> ranks) const;

  // Calls HeadKernels::CheckTeacher of each member's head with the same member's head of `teacher`. Both have
  // the same members.
  absl::Status CheckTeacher(const MemberHeads& teacher) const;
  // Submit computes a chunk in parts. Refuse calls the callbacks with an error when the chunk's turn comes.
  // `teacher`: the members' heads of the chunk's teacher; each member's part of the chunk gets that member's
  // head as its Chunk::teacher. Null: the chunk has no teacher.
  void Submit(Chunk* chunk, ChunkCallbacks callbacks, std::vector<ChunkPart> parts,
              const MemberHeads* teacher = nullptr);
  void Refuse(absl::Status refusal, ChunkCallbacks callbacks);
  void WaitUntilIdle() const { order_->WaitUntilIdle(); }

  // Calls `fn` for all members at the same time, each on its thread. Returns the first error in the order of
  // the members.
  absl::Status ForEach(absl::FunctionRef<absl::Status(int member, HeadKernels& head)> fn) const;

  // ---- Operations on all members; each member has some of the gradients. No chunk may be in flight. ----
  absl::Status CheckTrainable() const;
  // The norm of the gradients of all members together.
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
