// SPDX-License-Identifier: Apache-2.0
// One head on all members of a group: every member has all values and adds up the gradients of the rows that
// it computes; each class is updated by its owner (replica.h), which alone has the optimizer state.
//
// The gradient of a class is the sum over the members. Whatever looks at gradients first moves the sums to
// the owners (Replicas::SumGradients), once for all chunks since the last time.
#ifndef LOSSD_KERNELS_GROUP_GROUP_HEAD_H_
#define LOSSD_KERNELS_GROUP_GROUP_HEAD_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kernels/backend.h"
#include "kernels/group/division.h"
#include "kernels/group/member_heads.h"
#include "kernels/group/members.h"

namespace lossd::kernels {

// Thread-safety as HeadKernels.
class GroupHead final : public HeadKernels, public RemoteParts {
 public:
  // `heads`: one of each member, `replicas`: theirs. The members outlive the head.
  GroupHead(const HeadConfig& config, int64_t least_rows, Members* members,
            std::vector<std::unique_ptr<HeadKernels>> heads, std::unique_ptr<Replicas> replicas);
  ~GroupHead() override;

  // What such a head says of itself: what its first member says, and how rows are divided.
  static std::vector<Choice> Describe(std::vector<Choice> first, int64_t members, int64_t member_rows,
                                      int64_t least_rows);

  const HeadConfig& config() const override { return config_; }
  DType compute_dtype() const override { return head(0).compute_dtype(); }
  int64_t chunk_rows() const override { return members_->size() * limits_.member_rows; }
  int64_t slice_rows() const override { return limits_.member_rows; }
  MemoryBytes memory() const override { return heads_.memory(); }
  std::vector<Choice> Describe() const override;

  // A chunk is divided among the members by Divide, each time from the next member on, which computes a chunk
  // of few rows alone. An independent chunk that accumulates is computed by one member if that can take it,
  // by its turn.
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
  absl::Status Check(const Chunk& chunk) const;
  std::vector<ChunkPart> Parts(const Chunk& chunk);

  std::vector<Owned> OwnersOf(Param param, int64_t row_begin, int64_t rows) const;
  // Calls `fn` for each owner of some of the rows, on its thread, one after the other.
  absl::Status ForOwners(Param param, int64_t row_begin, int64_t rows,
                         absl::FunctionRef<absl::Status(HeadKernels& head, const Owned& owned)> fn) const;
  // Moves the sums to their owners, unless they are there.
  absl::Status SumGradients();

  const HeadConfig config_;
  MemberHeads heads_;
  const DivisionLimits limits_;
  Members* const members_;
  std::unique_ptr<Replicas> replicas_;
  uint64_t next_first_ = 0;  // of Divide
  bool summed_ = true;       // the owners have all sums, and all others have zeros
  absl::Status sum_lost_;    // not OK: a sum failed half-way, since then the gradients were not zeroed
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_GROUP_GROUP_HEAD_H_
