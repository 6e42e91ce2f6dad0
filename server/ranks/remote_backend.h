// SPDX-License-Identifier: Apache-2.0
// The backend of a worker, as a member of the leader's group: what is asked of it goes over the worker's
// stream, and it answers UNAVAILABLE once the worker is lost. Staging and retained memory are the leader's
// own.
//
// Thread-safety as Backend and HeadKernels.
#ifndef LOSSD_SERVER_RANKS_REMOTE_BACKEND_H_
#define LOSSD_SERVER_RANKS_REMOTE_BACKEND_H_

#include <atomic>
#include <memory>
#include <vector>

#include "kernels/remote_parts.h"
#include "server/ranks/worker_stream.h"

namespace lossd::ranks {

class RemoteHead final : public kernels::HeadKernels, public kernels::RemoteParts {
 public:
  // `description`: what the worker has said of the head.
  RemoteHead(const kernels::HeadConfig& config, uint64_t id, const v1::HeadDescription& description,
             std::shared_ptr<WorkerStream> worker);
  ~RemoteHead() override;

  const kernels::HeadConfig& config() const override { return config_; }
  kernels::DType compute_dtype() const override { return compute_dtype_; }
  int64_t chunk_rows() const override { return chunk_rows_; }
  int64_t slice_rows() const override { return slice_rows_; }
  kernels::MemoryBytes memory() const override { return memory_; }
  std::vector<kernels::Choice> Describe() const override { return choices_; }

  void Submit(kernels::Chunk* chunk, kernels::ChunkCallbacks callbacks) override;
  absl::Status ReadTensor(kernels::TensorId id, int64_t row_begin, int64_t rows, kernels::DType dtype,
                          absl::Span<uint8_t> out) override;
  absl::Status WriteTensor(kernels::TensorId id, int64_t row_begin, int64_t rows, kernels::DType dtype,
                           absl::Span<const uint8_t> in) override;
  absl::Status AddGradient(kernels::Param param, int64_t row_begin, int64_t rows, kernels::DType dtype,
                           float scale, absl::Span<const uint8_t> in) override;
  absl::StatusOr<double> GradNorm() override;
  absl::Status ApplyStep(const kernels::OptimizerOptions& options, int64_t update) override;
  absl::Status ZeroGradients() override;
  absl::Status ZeroMoments() override;
  std::vector<kernels::RemotePart> remote_parts() const override {
    return {{.rank = worker_->rank(), .head = id_.id}};
  }
  void PassBy(absl::Span<const int> ranks) override;

  // The worker's part of what all ranks do together: sent here, answered once all have done theirs.
  uint64_t StartSumGradients();
  uint64_t StartSpreadValues();
  WorkerStream& worker() const { return *worker_; }

 private:
  v1::Request NewRequest() const;
  // Rows that go in one message.
  int64_t PieceRows(kernels::Param param, kernels::DType dtype) const;

  const kernels::HeadConfig config_;
  const RemoteHeadId id_;
  const std::shared_ptr<WorkerStream> worker_;
  const kernels::DType compute_dtype_;
  const int64_t chunk_rows_;
  const int64_t slice_rows_;
  const kernels::MemoryBytes memory_;
  const std::vector<kernels::Choice> choices_;
  bool passed_by_ = false;
};

class RemoteBackend final : public kernels::Backend {
 public:
  // INTERNAL if the worker says what cannot be of its backend.
  static absl::StatusOr<std::unique_ptr<RemoteBackend>> Create(std::shared_ptr<WorkerStream> worker);

  kernels::BackendInfo info() const override { return info_; }
  kernels::MemoryStats memory() const override { return worker_->memory(); }
  int max_chunks_in_flight() const override { return worker_->hello().backend().max_chunks_in_flight(); }
  absl::StatusOr<kernels::MemoryBytes> PlanHead(const kernels::HeadConfig& config) const override;
  absl::StatusOr<std::unique_ptr<kernels::HeadKernels>> CreateHead(
      const kernels::HeadConfig& config) override;
  // UNIMPLEMENTED: what the hosts share lies at the leader.
  absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> AllocateStaging(int64_t bytes) override;
  absl::StatusOr<std::unique_ptr<kernels::RetainedMemory>> AllocateRetained(int64_t bytes) override;
  absl::Status PlanHostMemory(kernels::MemoryKind kind, int64_t bytes) override;

 private:
  RemoteBackend(kernels::BackendInfo info, std::shared_ptr<WorkerStream> worker)
      : info_(std::move(info)), worker_(std::move(worker)) {}

  const kernels::BackendInfo info_;
  const std::shared_ptr<WorkerStream> worker_;
  std::atomic<uint64_t> next_head_{1};
};

// The bytes of a tensor that go in one message, but for a single row that has more.
inline constexpr int64_t kPieceBytes = int64_t{4} << 20;
// Such messages that a tensor's read, write or addition has under way at a time: while one crosses the
// network, the worker deals with another. Their bytes lie in both processes.
inline constexpr size_t kPiecesUnderWay = 4;

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_REMOTE_BACKEND_H_
