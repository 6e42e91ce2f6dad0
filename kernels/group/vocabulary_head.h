// SPDX-License-Identifier: Apache-2.0
// VocabularyHead is a head whose classes are divided among the members of a group (group_backend.h). Each
// member has some of the classes, with their values, gradients and optimizer state, and computes its classes
// for all rows. While they compute a chunk, the members exchange sums over all classes (docs/scaling.md). All
// members have the norm's parameters and update them in the same way.
#ifndef LOSSD_KERNELS_GROUP_VOCABULARY_HEAD_H_
#define LOSSD_KERNELS_GROUP_VOCABULARY_HEAD_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "kernels/backend.h"
#include "kernels/group/members.h"
#include "kernels/validation.h"

namespace lossd::kernels {

// Threads as in HeadKernels.
class VocabularyHead final : public HeadKernels {
 public:
  // Creates another head of the same members, with the tensors of a new head.
  using Make = std::function<absl::StatusOr<std::unique_ptr<VocabularyHead>>(const HeadConfig& config)>;

  // `config`: the config that the caller asked for. `reason`: why the head is split by vocabulary, for
  // people. `heads`: the joined heads of the members; the split in their config is kVocabulary. The members,
  // and all objects that `make` uses, outlive the head.
  VocabularyHead(const HeadConfig& config, absl::string_view reason, Members* members,
                 std::vector<std::unique_ptr<HeadKernels>> heads, Make make)
      : config_(config),
        reason_(reason),
        make_(std::move(make)),
        heads_(std::make_unique<MemberHeads>(members, std::move(heads))) {}
  ~VocabularyHead() override { heads_->WaitUntilIdle(); }

  // Describes a VocabularyHead: `first`, which describes the head of the member with the most classes, and a
  // choice that says how classes are divided.
  static std::vector<Choice> Describe(std::vector<Choice> first, const HeadConfig& config, int members,
                                      absl::string_view reason);

  const HeadConfig& config() const override { return config_; }
  DType compute_dtype() const override { return heads_->head(0).compute_dtype(); }
  int64_t chunk_rows() const override { return heads_->chunk_rows(); }
  MemoryBytes memory() const override { return heads_->memory(); }
  std::vector<Choice> Describe() const override;

  // The teacher must be split over the same devices with the same shares as this head.
  absl::Status CheckTeacher(const HeadKernels& teacher) const override;
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
  bool divides_classes() const override { return true; }
  absl::Status SetShares(const std::vector<int32_t>& shares, Accept accept) override;
  std::vector<RemotePart> remote_parts() const override { return heads_->Remote(Split::kVocabulary); }
  void SkipWritesTo(absl::Span<const int> ranks) override { heads_->SkipWritesTo(ranks); }

 private:
  // Rows [first, first + rows) of a tensor; one member has them. In the host memory of the rows that an
  // operation asks for, they are the `bytes` bytes from byte `offset` on.
  struct Owned {
    int64_t first = 0;
    int64_t rows = 0;
    size_t offset = 0;
    size_t bytes = 0;
  };

  // Calls `fn` at the same time for all members that have some of the rows, each on its thread. Rows of
  // weight and bias belong to one member each. Rows of other parameters are on all members: `fn` is called
  // for all of them or, with `first_alone`, only for the first.
  absl::Status ForOwners(TensorId id, int64_t row_begin, int64_t rows, DType dtype, bool first_alone,
                         absl::FunctionRef<absl::Status(HeadKernels& head, const Owned& owned)> fn) const;

  // SetShares holds it while it replaces config_ and heads_. CheckTeacher holds it while it reads them,
  // because any thread may call CheckTeacher.
  mutable absl::Mutex division_;
  HeadConfig config_;  // SetShares changes its shares
  const std::string reason_;
  const Make make_;
  std::unique_ptr<MemberHeads> heads_;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_GROUP_VOCABULARY_HEAD_H_
