// SPDX-License-Identifier: Apache-2.0
// One head of which a group has several copies, the replicas. Each replica has all values and adds up the
// gradients of the rows that it computes. Each class is updated by its owner (replica.h), which alone has the
// optimizer state. A replica is one member, or several members that divide the classes and compute the same
// rows, as the members of a VocabularyHead do.
//
// The gradient of a class is the sum over the replicas. Whatever looks at gradients first moves the sums to
// the owners (Replicas::SumGradients), once for all chunks since the last time.
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

// How the replicas of a head are made.
struct ReplicaLayout {
  int64_t least_rows = 0;  // GroupOptions::least_rows
  // By vocabulary: why the head is divided so, for people, and GroupOptions::member_of.
  std::string reason = "";
  std::function<int(const void* hidden)> member_of = nullptr;
};

// Thread-safety as HeadKernels.
class GroupHead final : public HeadKernels {
 public:
  // `config`: as it was asked for. `heads`: one of each member, whose config says how they divide the head
  // (PlacesOf); those that divide classes are joined. `replicas`: theirs. The members outlive the head.
  GroupHead(const HeadConfig& config, ReplicaLayout layout, Members* members,
            std::vector<std::unique_ptr<HeadKernels>> heads, std::unique_ptr<Replicas> replicas);
  ~GroupHead() override;

  // What such a head on so many members says of itself: what its member with the most classes says, and how
  // rows are divided. `divided`: the config of the members.
  static std::vector<Choice> Describe(std::vector<Choice> first, const HeadConfig& divided, int members,
                                      int64_t member_rows, const ReplicaLayout& layout);

  const HeadConfig& config() const override { return config_; }
  DType compute_dtype() const override { return head(0).compute_dtype(); }
  int64_t chunk_rows() const override { return limits_.members * limits_.member_rows; }
  int64_t slice_rows() const override { return limits_.member_rows; }
  MemoryBytes memory() const override { return heads_.memory(); }
  std::vector<Choice> Describe() const override;
  std::optional<PagingStats> paging() const override;  // each device has a pool and a copy of its own

  // Every device computes with its own part of the teacher.
  absl::Status CheckTeacher(const HeadKernels& teacher) const override;
  // A chunk is divided among the replicas by Divide, each time from the next one on, which computes a chunk
  // of few rows alone; rows that lie on a device of a replica that divides the classes are that one's. An
  // independent chunk that accumulates is computed by one replica if that can take it, by its turn.
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
  void PassBy(absl::Span<const int> ranks) override { heads_.PassBy(ranks); }

 private:
  // Some rows that one member owns: rows [first, first + rows), which begin at `offset` of the rows asked
  // for.
  struct Owned {
    int member = 0;
    int64_t first = 0;
    int64_t rows = 0;
    int64_t offset = 0;
  };

  HeadKernels& head(int member) const { return heads_.head(member); }
  const HeadConfig& divided() const { return head(0).config(); }
  absl::Status Check(const Chunk& chunk) const;
  // Of the replicas, and of the members.
  std::vector<ChunkPart> DivideRows(const Chunk& chunk);
  std::vector<ChunkPart> Parts(const Chunk& chunk);
  // The replica on a device of which each slice lies, -1: not known; or nothing, where that does not matter.
  std::vector<int> HomesOf(const Chunk& chunk) const;

  // In the order of the members. What is not of classes is updated by several alike where they divide these.
  std::vector<Owned> OwnersOf(Param param, int64_t row_begin, int64_t rows) const;
  // Calls `fn` for each owner of some of the rows, on its thread, one after the other.
  absl::Status ForOwners(const std::vector<Owned>& owners,
                         absl::FunctionRef<absl::Status(HeadKernels& head, const Owned& owned)> fn) const;
  // Moves the sums to their owners, unless they are there.
  absl::Status SumGradients();

  const HeadConfig config_;
  MemberHeads heads_;
  const ReplicaLayout layout_;
  const int places_;             // members of a replica
  const DivisionLimits limits_;  // whose members are the replicas
  Members* const members_;
  std::unique_ptr<Replicas> replicas_;
  uint64_t next_first_ = 0;  // of Divide
  bool summed_ = true;       // the owners have all sums, and all others have zeros
  absl::Status sum_lost_;    // not OK: a sum failed half-way, since then the gradients were not zeroed
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_GROUP_GROUP_HEAD_H_
