// SPDX-License-Identifier: Apache-2.0
// The leader's view of its workers. RemoteBackend is the backend of a worker, and RemoteHead a head on it, as
// members of the leader's group (kernels/group). MakeRankReplicas and JoinRankClasses let all ranks work on
// one head together. RankFiles lets workers save and load their parts of heads. UseCollectives chooses the
// library that carries the sums and exchanges between ranks.
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
  // `description`: the worker's description of the head that it has created.
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
  // If the worker's rank is among `ranks`, WriteTensor sends nothing from now on: the worker gets its rows in
  // another way, for example from files that the worker reads itself (RankFiles).
  void SkipWritesTo(absl::Span<const int> ranks) override;

  // Start the worker's part of an operation that all ranks do together. Return the id of the request, for
  // WorkerStream::Await. The worker answers once all ranks have done their parts.
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
  bool skips_writes_ = false;  // WriteTensor sends nothing
};

// The backend of a worker. It has no staging memory and no retained memory, because the leader has both.
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
  // The next three return UNIMPLEMENTED, because the leader has such host memory.
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
// The number of such messages that one read, write or addition of a tensor has under way at a time. So the
// worker handles one message while another crosses the network. Their bytes take memory in both processes.
inline constexpr size_t kPiecesUnderWay = 4;

// ---- Operations that all ranks do together ----
// The leader tells every worker to do its part, and does its own part at the same time.

// The replicas of one head on all ranks. `heads`: first the leader's own head, which belongs to the backend
// of `link`, then the workers' heads (RemoteHead) in the order of ranks. If one rank has an error, the
// operation returns this error, although other ranks may have done their parts. If the leader has done its
// part and a worker does not answer within `timeout` plus kLastWords, the leader gives the worker up: a
// worker that is alive reports an error when its own `timeout` is over. If the leader's part has failed, it
// waits at most kLastWords for the workers' errors, which name the cause.
absl::StatusOr<std::unique_ptr<kernels::Replicas>> MakeRankReplicas(
    kernels::RankLink* link, absl::Duration timeout, absl::Span<kernels::HeadKernels* const> heads);

// Joins the leader's part of a head that is split by vocabulary to the parts of the workers, which the
// workers have joined already. `heads` as for MakeRankReplicas. `same_chunks`: whether chunks must have the
// same size on all ranks; then ranks with different chunk_rows() are an INVALID_ARGUMENT, which names rank
// and values.
absl::Status JoinRankClasses(kernels::RankLink* link, bool same_chunks,
                             absl::Span<kernels::HeadKernels* const> heads);

// RankFiles lets workers save and load their own parts of checkpoints. RankFiles is the leader's end, and
// WorkerFiles (worker.h) the worker's end.
//
// Thread-safe. Objects that RankFiles makes must be destroyed before the RankFiles and before the leader.
class RankFiles final : public head::FileSites {
 public:
  using Workers = std::map<int, std::shared_ptr<WorkerStream>>;

  // Sets the streams of all workers. Call once, before the other member functions.
  void SetWorkers(const Workers& workers) ABSL_LOCKS_EXCLUDED(mutex_);

  std::vector<std::unique_ptr<head::SaveSite>> ForSave(absl::Span<const kernels::RemotePart> parts) override;
  std::vector<std::unique_ptr<head::LoadSite>> ForLoad(absl::Span<const kernels::RemotePart> parts) override;

  // Logs whether a rank saves its part itself or through rank 0, if this has changed. `what` says whether
  // this is about saving or loading. A `status` that is not OK is the reason why the rank cannot do it
  // itself.
  void Note(int rank, const std::string& what, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  std::shared_ptr<WorkerStream> Find(int rank) const ABSL_LOCKS_EXCLUDED(mutex_);

  mutable absl::Mutex mutex_;
  Workers workers_ ABSL_GUARDED_BY(mutex_);
  std::map<std::pair<int, std::string>, std::string> noted_ ABSL_GUARDED_BY(mutex_);
};

// ---- The library that carries the sums and exchanges of all ranks ----
// The leader chooses the library when all workers have connected. The functions are stateless and
// thread-safe.

// INVALID_ARGUMENT naming rank and GPU if two ranks have the same GPU. `why`: the reason why each rank needs
// a GPU of its own, for the error message. CPUs have no names, and are not compared.
absl::Status CheckGpus(const std::string& why, const std::string& leader_gpu,
                       absl::Span<const v1::Hello> workers);

struct CollectivesChoice {
  std::string collectives;  // the chosen library, as in kernels/rank_link.h
  // The reason why this is not the first library that the leader offers; empty if it is the first.
  std::string reason;
};

// The first library of `offered`, the leader's offer, that works with all workers: each worker must offer it
// too. NCCL also needs a GPU for each rank, and the same version of NCCL on all ranks; `nccl_version` is the
// leader's. INVALID_ARGUMENT naming the obstacle to the first library if no library works.
absl::StatusOr<CollectivesChoice> ChooseCollectives(absl::Span<const std::string> offered,
                                                    const std::string& leader_gpu,
                                                    const std::string& nccl_version,
                                                    absl::Span<const v1::Hello> workers);

// Chooses a library as ChooseCollectives does, sets it in the leader's own `link`, and logs it. If each
// process has several `devices`, no two ranks may have the same GPU, for any library.
absl::StatusOr<std::string> UseCollectives(kernels::RankLink* link, const std::string& leader_gpu,
                                           int devices, absl::Span<const v1::Hello> workers);

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_REMOTE_BACKEND_H_
