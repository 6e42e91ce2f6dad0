// SPDX-License-Identifier: Apache-2.0
// What the leader makes of its workers. RemoteBackend and RemoteHead are a worker's backend and a head on it,
// as members of the leader's group (kernels/group). MakeRankReplicas and JoinRankClasses let all ranks do
// their parts of one head together, RankFiles lets workers save and load their parts, and UseCollectives
// chooses what carries the sums and exchanges between ranks.
//
// All of it sends messages over the workers' streams (worker_stream.h). Once a worker is lost, calls that
// need it answer UNAVAILABLE. Threads as in Backend and HeadKernels, unless a class says otherwise.
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

  // The teacher is a head of the same worker, whose hidden states are not too large for messages.
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

// The backend of a worker. Staging and retained memory are the leader's own.
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

// ---- What all ranks do together ----
// The leader tells every worker to do its part and does its own meanwhile.

// The replicas of one head on all ranks. `heads`: the leader's own, of the backend of `link`, then those of
// the workers in the order of their ranks (RemoteHead). An error of one rank is that of all: whatever a rank
// could not do may be done at others. A worker that does not answer within `timeout`, and a little more for
// it to notice that itself, is given up.
absl::StatusOr<std::unique_ptr<kernels::Replicas>> MakeRankReplicas(
    kernels::RankLink* link, absl::Duration timeout, absl::Span<kernels::HeadKernels* const> heads);

// Joins the leader's part of a head that is split by vocabulary to those of the workers, who have joined
// theirs. `heads` as for MakeRankReplicas. INVALID_ARGUMENT naming rank and values if chunks have to be of
// the same size on all ranks, and would not be.
absl::Status JoinRankClasses(kernels::RankLink* link, bool same_chunks,
                             absl::Span<kernels::HeadKernels* const> heads);

// The leader's end of the work of its workers on files of checkpoints (worker.h).
//
// Thread-safe. The objects that it makes outlive neither it nor the leader.
class RankFiles final : public head::FileSites {
 public:
  using Workers = std::map<int, std::shared_ptr<WorkerStream>>;

  // Gives it the streams of all workers. Call once, before the other members.
  void SetWorkers(const Workers& workers) ABSL_LOCKS_EXCLUDED(mutex_);

  std::vector<std::unique_ptr<head::SaveSite>> ForSave(absl::Span<const kernels::RemotePart> parts) override;
  std::vector<std::unique_ptr<head::LoadSite>> ForLoad(absl::Span<const kernels::RemotePart> parts) override;

  // Logs how a rank's part is saved, or loaded, when that is news. Not OK: why not by itself.
  void Note(int rank, const std::string& what, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  std::shared_ptr<WorkerStream> Find(int rank) const ABSL_LOCKS_EXCLUDED(mutex_);

  mutable absl::Mutex mutex_;
  Workers workers_ ABSL_GUARDED_BY(mutex_);
  std::map<std::pair<int, std::string>, std::string> noted_ ABSL_GUARDED_BY(mutex_);
};

// ---- What carries the sums and exchanges of all ranks ----
// The leader chooses it when all workers have come. The functions are stateless and thread-safe.

// INVALID_ARGUMENT naming rank and GPU if two ranks have the same GPU; `why`: what needs one for each. CPUs
// have no names, and are not compared.
absl::Status CheckGpus(const std::string& why, const std::string& leader_gpu,
                       absl::Span<const v1::Hello> workers);

struct CollectivesChoice {
  std::string collectives;  // kernels/rank_link.h
  std::string reason;       // why not the best that the leader has; empty if it is that
};

// The first of what the leader offers that all workers offer as well and that can be: NCCL connects only
// ranks with a GPU each and the same version of it; `nccl_version` is the leader's. INVALID_ARGUMENT naming
// what is in the way if there is none.
absl::StatusOr<CollectivesChoice> ChooseCollectives(absl::Span<const std::string> offered,
                                                    const std::string& leader_gpu,
                                                    const std::string& nccl_version,
                                                    absl::Span<const v1::Hello> workers);

// Chooses as ChooseCollectives for the leader's own link, which uses the choice from then on, and logs it.
// Processes that have several `devices` each may have no GPU in common, whatever the collectives.
absl::StatusOr<std::string> UseCollectives(kernels::RankLink* link, const std::string& leader_gpu,
                                           int devices, absl::Span<const v1::Hello> workers);

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_REMOTE_BACKEND_H_
