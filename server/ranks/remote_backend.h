// SPDX-License-Identifier: Apache-2.0
// The leader's view of its workers. RemoteBackend is the backend of a worker, and RemoteHead a head on it, as
// members of the leader's group (kernels/group). MakeRankReplicas and JoinRankClasses let all ranks do their
// parts of one head together, RankFiles lets workers save and load their parts, and UseCollectives chooses
// what carries the sums and exchanges between ranks.
//
// All functions and classes send messages over the workers' streams (worker_stream.h). Once a worker is lost,
// calls that need it return UNAVAILABLE. Thread-safety is that of Backend and HeadKernels, unless a class
// says otherwise.
#ifndef LOSSD_SERVER_RANKS_REMOTE_BACKEND_H_
#define LOSSD_SERVER_RANKS_REMOTE_BACKEND_H_

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/rank_link.h"
#include "kernels/replica.h"
#include "lossd/ranks/v1/ranks.pb.h"
#include "server/head/file_sites.h"
#include "server/ranks/worker_stream.h"

namespace lossd::ranks {

// A head of a worker's backend.
class RemoteHead final : public kernels::HeadKernels {
 public:
  // `description`: what the worker has answered about the head that it created.
  RemoteHead(const kernels::HeadConfig& config, uint64_t id, const v1::HeadDescription& description,
             std::shared_ptr<WorkerStream> worker);
  ~RemoteHead() override;

  const kernels::HeadConfig& config() const override { return config_; }
  kernels::DType compute_dtype() const override { return compute_dtype_; }
  int64_t chunk_rows() const override { return chunk_rows_; }
  int64_t slice_rows() const override { return slice_rows_; }
  kernels::MemoryBytes memory() const override { return memory_; }
  std::vector<kernels::Choice> Describe() const override { return choices_; }

  // Checks that the teacher is a head of the same worker, and that its hidden states are not too large for
  // messages.
  absl::Status CheckTeacher(const kernels::HeadKernels& teacher) const override;
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

  // Start the worker's part of an operation that all ranks do together. The worker answers once all ranks
  // have done their parts.
  uint64_t StartSumGradients();
  uint64_t StartSpreadValues();
  WorkerStream& worker() const { return *worker_; }

 private:
  v1::Request NewRequest() const;
  // The number of tensor rows that go into one message.
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

// The backend of a worker. It has no staging and no retained memory, which the leader has.
class RemoteBackend final : public kernels::Backend {
 public:
  // INTERNAL if the worker's description of its backend is not valid.
  static absl::StatusOr<std::unique_ptr<RemoteBackend>> Create(std::shared_ptr<WorkerStream> worker);

  kernels::BackendInfo info() const override { return info_; }
  kernels::MemoryStats memory() const override { return worker_->memory(); }
  int max_chunks_in_flight() const override { return worker_->hello().backend().max_chunks_in_flight(); }
  absl::StatusOr<kernels::MemoryBytes> PlanHead(const kernels::HeadConfig& config) const override;
  absl::StatusOr<std::unique_ptr<kernels::HeadKernels>> CreateHead(
      const kernels::HeadConfig& config) override;
  // These three return UNIMPLEMENTED: such host memory is the leader's.
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

// The most bytes of a tensor in one message. A single row may have more.
inline constexpr int64_t kPieceBytes = int64_t{4} << 20;
// How many of these messages one read, write or addition of a tensor has under way: while one message crosses
// the network, the worker handles another. Their bytes take memory in both processes.
inline constexpr size_t kPiecesUnderWay = 4;

// ---- What all ranks do together ----
// The leader tells every worker to do its part and does its own meanwhile.

// The replicas of one head on all ranks. `heads`: first the leader's own head, which is of the backend of
// `link`, then the workers' heads (RemoteHead) in the order of ranks. If one rank has an error, the operation
// returns it, although other ranks may have done their parts. A worker that does not answer within `timeout`
// plus kLastWords is given up; in that time it should have noticed the delay itself.
absl::StatusOr<std::unique_ptr<kernels::Replicas>> MakeRankReplicas(
    kernels::RankLink* link, absl::Duration timeout, absl::Span<kernels::HeadKernels* const> heads);

// Joins the leader's part of a head that is split by vocabulary to the parts of the workers, which the
// workers have joined already. `heads` as for MakeRankReplicas. `same_chunks`: chunks must have the same size
// on all ranks. INVALID_ARGUMENT naming rank and values if they would not.
absl::Status JoinRankClasses(kernels::RankLink* link, bool same_chunks,
                             absl::Span<kernels::HeadKernels* const> heads);

// RankFiles lets workers save and load their own parts of checkpoints. It is the leader's end; WorkerFiles
// (worker.h) is the worker's end.
//
// Thread-safe. Destroy the objects that it makes before it and before the leader.
class RankFiles final : public head::FileSites {
 public:
  using Workers = std::map<int, std::shared_ptr<WorkerStream>>;

  // Sets the streams of all workers. Call once, before the other member functions.
  void SetWorkers(const Workers& workers) ABSL_LOCKS_EXCLUDED(mutex_);

  std::vector<std::unique_ptr<head::SaveSite>> ForSave(absl::Span<const kernels::RemotePart> parts) override;
  std::vector<std::unique_ptr<head::LoadSite>> ForLoad(absl::Span<const kernels::RemotePart> parts) override;

  // Logs whether a rank saves (or loads, in `what`) its part itself or through rank 0, if this has changed. A
  // `status` that is not OK says why the rank cannot do it itself.
  void Note(int rank, const std::string& what, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  std::shared_ptr<WorkerStream> Find(int rank) const ABSL_LOCKS_EXCLUDED(mutex_);

  mutable absl::Mutex mutex_;
  Workers workers_ ABSL_GUARDED_BY(mutex_);
  std::map<std::pair<int, std::string>, std::string> noted_ ABSL_GUARDED_BY(mutex_);
};

// ---- What carries the sums and exchanges of all ranks ----
// The leader chooses a library for them when all workers have connected. The functions are stateless and
// thread-safe.

// INVALID_ARGUMENT naming rank and GPU if two ranks have the same GPU. `why`: what needs a GPU for each rank,
// for the message. CPUs have no names, and are not compared.
absl::Status CheckGpus(const std::string& why, const std::string& leader_gpu,
                       absl::Span<const v1::Hello> workers);

struct CollectivesChoice {
  std::string collectives;  // the chosen library, as in kernels/rank_link.h
  std::string reason;       // why it is not the first that the leader offers; empty if it is the first
};

// The first library of `offered`, the leader's offer, that works with all workers: each worker must offer it
// too. NCCL also needs a GPU for each rank, and the same version of NCCL on all ranks; `nccl_version` is the
// leader's. INVALID_ARGUMENT naming the obstacle to the first library if no library works.
absl::StatusOr<CollectivesChoice> ChooseCollectives(absl::Span<const std::string> offered,
                                                    const std::string& leader_gpu,
                                                    const std::string& nccl_version,
                                                    absl::Span<const v1::Hello> workers);

// Chooses as ChooseCollectives does, sets the choice in `link`, the leader's own, and logs it. If processes
// have several `devices` each, no two ranks may have the same GPU, with any library.
absl::StatusOr<std::string> UseCollectives(kernels::RankLink* link, const std::string& leader_gpu,
                                           int devices, absl::Span<const v1::Hello> workers);

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_REMOTE_BACKEND_H_
