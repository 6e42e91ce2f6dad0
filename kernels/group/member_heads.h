// SPDX-License-Identifier: Apache-2.0
// The heads that the members of a group have of one head, and the chunks that they compute together.
//
// Driven by the group's driving thread; the heads themselves are called on their members' threads.
#ifndef LOSSD_KERNELS_GROUP_MEMBER_HEADS_H_
#define LOSSD_KERNELS_GROUP_MEMBER_HEADS_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/group/chunk_order.h"
#include "kernels/group/division.h"
#include "kernels/group/members.h"
#include "kernels/remote_parts.h"

namespace lossd::kernels {

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

  // Computes a chunk in parts, or calls back with the refusal when its turn comes.
  void Submit(Chunk* chunk, ChunkCallbacks callbacks, std::vector<ChunkPart> parts);
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

#endif  // LOSSD_KERNELS_GROUP_MEMBER_HEADS_H_
