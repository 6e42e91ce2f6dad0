// SPDX-License-Identifier: Apache-2.0
// GroupHead is a head of which a group (group_backend.h) has several copies, the replicas. The replicas
// divide the rows. Each replica has all values, and sums the gradients of the rows that it computes. Each
// class is updated by one replica, its owner (replica.h); only the owner has the class's optimizer state. A
// replica is one member, or several members that divide the classes and compute the same rows, like the
// members of a VocabularyHead.
//
// The gradient of a class is the sum over the replicas. Before an operation reads gradients,
// Replicas::SumGradients adds up the gradients of all chunks since its last call, and moves the sums to the
// owners.
#ifndef LOSSD_KERNELS_GROUP_GROUP_HEAD_H_
#define LOSSD_KERNELS_GROUP_GROUP_HEAD_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kernels/backend.h"
#include "kernels/group/group_chunk.h"
#include "kernels/group/members.h"

namespace lossd::kernels {

// How a group divides rows among the replicas of a head.
struct ReplicaLayout {
  int64_t least_rows = 0;  // GroupOptions::least_rows
  // The next two members are used only if a replica is several members that divide the classes. `reason`: why
  // the head is split in this way, for people. `member_of`: GroupOptions::member_of.
  std::string reason = "";
  std::function<int(const void* hidden)> member_of = nullptr;
};

// Threads as in HeadKernels.
class GroupHead final : public HeadKernels {
 public:
  // `config`: the config that the caller asked for. `heads`: the head of each member; their config says how
  // they divide the head (PlacesOf), and heads that divide classes have been joined. `replicas` connects the
  // heads. The members outlive the head.
  GroupHead(const HeadConfig& config, ReplicaLayout layout, Members* members,
            std::vector<std::unique_ptr<HeadKernels>> heads, std::unique_ptr<Replicas> replicas);
  ~GroupHead() override;

  // Describes a GroupHead on `members` members: `first`, which describes the head of the member with the most
  // classes, and a choice that says how rows are divided. `divided`: the config of the members' heads.
  static std::vector<Choice> Describe(std::vector<Choice> first, const HeadConfig& divided, int members,
                                      int64_t member_rows, const ReplicaLayout& layout);

  const HeadConfig& config() const override { return config_; }
  DType compute_dtype() const override { return head(0).compute_dtype(); }
  int64_t chunk_rows() const override { return limits_.members * limits_.member_rows; }
  int64_t slice_rows() const override { return limits_.member_rows; }
  MemoryBytes memory() const override { return heads_.memory(); }
  std::vector<Choice> Describe() const override;
  std::optional<PagingStats> paging() const override;  // each device has a pool and a copy of its own

  // The teacher must be divided over the same devices in the same way as this head, because each device
  // computes with its own part of the teacher.
  absl::Status CheckTeacher(const HeadKernels& teacher) const override;
  // Divides a chunk among the replicas (Divide in group_chunk.h):
  // - The first replica to get rows changes with each chunk. It computes a chunk of few rows alone.
  // - If the members of a replica divide the classes, rows that lie in a device's memory go to the replica of
  //   that device.
  // - An independent chunk that accumulates goes to one replica, chosen by Chunk::turn, if it has no more
  //   rows than a replica takes.
  void Submit(Chunk* chunk, ChunkCallbacks callbacks) override;

  absl::Status ReadTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                          absl::Span<uint8_t> out) override;
  absl::Status WriteTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                           absl::Span<const uint8_t> in) override;
  absl::Status AddGradient(Param param, int64_t row_begin, int64_t rows, DType dtype, float scale,
                           absl::Span<const uint8_t> in) override;
  absl::StatusOr<double> GradNorm() override;
  absl::Status ApplyStep(const OptimizerOptions& options, int64_t update) override;
  absl::Status ZeroGradients() override;
  absl::Status ZeroMoments() override;
  std::vector<RemotePart> remote_parts() const override { return heads_.Remote(Split::kRows); }
  void SkipWritesTo(absl::Span<const int> ranks) override { heads_.SkipWritesTo(ranks); }

 private:
  // Rows that one member owns: rows [first, first + rows) of the tensor. Their first row has index `offset`
  // among the rows that an operation asks for.
  struct Owned {
    int member = 0;
    int64_t first = 0;
    int64_t rows = 0;
    int64_t offset = 0;
  };

  HeadKernels& head(int member) const { return heads_.head(member); }
  const HeadConfig& divided() const { return head(0).config(); }
  absl::Status Check(const Chunk& chunk) const;
  // The parts of a chunk for the replicas (DivideRows), and for the members (Parts).
  std::vector<ChunkPart> DivideRows(const Chunk& chunk);
  std::vector<ChunkPart> Parts(const Chunk& chunk);
  // For each slice, the replica whose device has the rows of the slice; -1 if the device is not known. Empty
  // if the place of the rows does not matter.
  std::vector<int> HomesOf(const Chunk& chunk) const;

  // The owners of rows, in the order of the members. If members divide classes, a parameter that does not
  // belong to classes has several owners, which all update it in the same way.
  std::vector<Owned> OwnersOf(Param param, int64_t row_begin, int64_t rows) const;
  // Calls `fn` for each of the owners, on the owner's thread, one after the other.
  absl::Status ForOwners(const std::vector<Owned>& owners,
                         absl::FunctionRef<absl::Status(HeadKernels& head, const Owned& owned)> fn) const;
  // Moves the sums of gradients to their owners, unless the owners have them already.
  absl::Status SumGradients();

  const HeadConfig config_;
  MemberHeads heads_;
  const ReplicaLayout layout_;
  const int places_;             // number of members of a replica
  const DivisionLimits limits_;  // for Divide, with the replicas as its members
  Members* const members_;
  std::unique_ptr<Replicas> replicas_;
  uint64_t next_first_ = 0;  // counts chunks, for Divide's first_member
  bool summed_ = true;       // the owners have all sums of gradients, and the other replicas have zeros
  // Not OK: a summation failed half-way, and the gradients have not been zeroed since.
  absl::Status sum_lost_;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_GROUP_GROUP_HEAD_H_
