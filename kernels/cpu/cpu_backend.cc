// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu_backend.h"

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "kernels/backend.h"
#include "kernels/cpu/cpu_head.h"
#include "kernels/cpu/head_buffers.h"
#include "kernels/cpu/memory.h"
#include "kernels/cpu/parallel_for.h"
#include "kernels/cpu/row_loops.h"
#include "kernels/errors/field_error.h"

namespace lossd::kernels {
namespace {

constexpr int kMostThreads = 1024;

class CpuStaging final : public StagingMemory {
 public:
  CpuStaging(AlignedBytes memory, int64_t bytes, MemoryAccounting::Reservation reservation)
      : reservation_(std::move(reservation)), memory_(std::move(memory)), bytes_(bytes) {}

  absl::Span<uint8_t> bytes() override { return {memory_.get(), static_cast<size_t>(bytes_)}; }

 private:
  const MemoryAccounting::Reservation reservation_;
  const AlignedBytes memory_;
  const int64_t bytes_;
};

class AdoptedStaging final : public StagingMemory {
 public:
  AdoptedStaging(absl::Span<uint8_t> memory, MemoryAccounting::Reservation reservation)
      : reservation_(std::move(reservation)), memory_(memory) {}

  absl::Span<uint8_t> bytes() override { return memory_; }

 private:
  const MemoryAccounting::Reservation reservation_;
  const absl::Span<uint8_t> memory_;
};

// What is refused, in errors.
constexpr absl::string_view kTheHead = "the head";

class CpuBackend final : public Backend {
 public:
  // `accounting` may be shared with others.
  CpuBackend(const CpuBackendOptions& options, Replica replica, int threads,
             std::shared_ptr<MemoryAccounting> accounting)
      : workspace_bytes_(options.workspace_bytes),
        replica_(replica),
        accounting_(std::move(accounting)),
        pool_(threads) {}

  BackendInfo info() const override {
    return {"cpu",
            absl::StrCat(pool_.threads(), pool_.threads() == 1 ? " thread" : " threads", ", OpenBLAS, ",
                         SelectRowLoops().instruction_set),
            DType::kFloat32};
  }
  MemoryStats memory() const override { return accounting_->stats(); }
  int max_chunks_in_flight() const override { return 1; }

  absl::StatusOr<MemoryBytes> PlanHead(const HeadConfig& config) const override {
    absl::StatusOr<int64_t> chunk_rows = ChunkRows(config);
    if (!chunk_rows.ok()) return chunk_rows.status();
    return PlanBuffers(config, replica_, *chunk_rows);
  }

  absl::StatusOr<PlannedHead> PlanWholeHead(const HeadConfig& config,
                                            const MemoryBytes& beside) const override {
    absl::StatusOr<int64_t> chunk_rows = ChunkRows(config);
    if (!chunk_rows.ok()) return chunk_rows.status();
    PlannedHead planned;
    planned.memory = PlanBuffers(config, replica_, *chunk_rows);
    if (absl::Status status = accounting_->Check(kTheHead, planned.memory, beside); !status.ok())
      return status;
    planned.chunk_rows = planned.slice_rows = *chunk_rows;
    planned.choices =
        DescribeCpuHead(config, *chunk_rows, planned.memory[MemoryKind::kWorkspace], pool_.threads());
    return planned;
  }

  absl::StatusOr<std::unique_ptr<HeadKernels>> CreateHead(const HeadConfig& config) override {
    absl::StatusOr<int64_t> chunk_rows = ChunkRows(config);
    if (!chunk_rows.ok()) return chunk_rows.status();
    absl::StatusOr<MemoryAccounting::Reservation> reservation =
        accounting_->Reserve(kTheHead, PlanBuffers(config, replica_, *chunk_rows), /*filled_at_once=*/true);
    if (!reservation.ok()) return reservation.status();
    return CpuHead::Create(config, replica_, *chunk_rows, &pool_, *std::move(reservation));
  }

  absl::StatusOr<std::unique_ptr<StagingMemory>> AllocateStaging(int64_t bytes) override {
    return Allocate<StagingMemory, CpuStaging>(MemoryKind::kStaging, bytes);
  }
  absl::StatusOr<std::unique_ptr<StagingMemory>> AdoptStaging(absl::Span<uint8_t> memory,
                                                              const AdoptOptions& options) override {
    MemoryBytes plan;
    plan[MemoryKind::kStaging] = options.counted ? static_cast<int64_t>(memory.size()) : 0;
    auto reservation = accounting_->Reserve("shared memory", plan);
    if (!reservation.ok()) return reservation.status();
    return std::make_unique<AdoptedStaging>(memory, *std::move(reservation));
  }
  absl::StatusOr<std::unique_ptr<RetainedMemory>> AllocateRetained(int64_t bytes) override {
    return Allocate<RetainedMemory, CpuRetained>(MemoryKind::kRetained, bytes);
  }

  absl::Status PlanHostMemory(MemoryKind kind, int64_t bytes) override {
    MemoryBytes plan;
    plan[kind] = bytes;
    auto reservation = accounting_->Reserve(absl::StrCat(Name(kind), " memory"), plan);
    if (!reservation.ok()) return reservation.status();
    absl::MutexLock lock(&planned_mutex_);
    planned_.push_back(*std::move(reservation));
    return absl::OkStatus();
  }

 private:
  template <typename Interface, typename Memory>
  absl::StatusOr<std::unique_ptr<Interface>> Allocate(MemoryKind kind, int64_t bytes) {
    if (bytes < 0) return errors::FieldError("bytes", "be >= 0", bytes);
    MemoryBytes plan;
    plan[kind] = bytes;
    auto reservation = accounting_->Reserve(absl::StrCat(Name(kind), " memory"), plan);
    if (!reservation.ok()) return reservation.status();
    absl::StatusOr<AlignedBytes> memory = AllocateAligned(bytes);
    if (!memory.ok()) return memory.status();
    return std::make_unique<Memory>(*std::move(memory), bytes, *std::move(reservation));
  }

  absl::StatusOr<int64_t> ChunkRows(const HeadConfig& config) const {
    if (absl::Status status = ValidateOn(config, replica_.count); !status.ok()) return status;
    return ChunkRowsFor(config, replica_.count,
                        config.workspace_bytes > 0 ? config.workspace_bytes : workspace_bytes_);
  }

  const int64_t workspace_bytes_;
  const Replica replica_;
  const std::shared_ptr<MemoryAccounting> accounting_;
  absl::Mutex planned_mutex_;
  std::vector<MemoryAccounting::Reservation> planned_ ABSL_GUARDED_BY(planned_mutex_);
  ThreadPool pool_;
};

absl::Status Check(const CpuBackendOptions& options) {
  if (options.threads < 0 || options.threads > kMostThreads) {
    return errors::FieldError("threads", absl::StrCat("be in [0, ", kMostThreads, "]"), options.threads);
  }
  if (options.workspace_bytes < 1) {
    return errors::FieldError("workspace_bytes", "be >= 1", options.workspace_bytes);
  }
  if (options.memory_limit_bytes < 0) {
    return errors::FieldError("memory_limit_bytes", "be >= 0", options.memory_limit_bytes);
  }
  if (options.memory_reserve_bytes < 0) {
    return errors::FieldError("memory_reserve_bytes", "be >= 0", options.memory_reserve_bytes);
  }
  return absl::OkStatus();
}

int ThreadsOf(const CpuBackendOptions& options) {
  if (options.threads > 0) return options.threads;
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

std::shared_ptr<MemoryAccounting> AccountingOf(const CpuBackendOptions& options) {
  return std::make_shared<MemoryAccounting>(options.memory_limit_bytes, HostMemory(options.host_root),
                                            options.memory_reserve_bytes);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> CreateCpuBackend(const CpuBackendOptions& options) {
  if (absl::Status status = Check(options); !status.ok()) return status;
  if (options.sharers < 1 || options.sharers > kMostThreads) {
    return errors::FieldError("cpu_devices", absl::StrCat("be in [1, ", kMostThreads, "]"), options.sharers);
  }
  if (options.replica.index < 0 || options.replica.index >= options.replica.count) {
    return errors::FieldError("replica.index", absl::StrCat("be in [0, ", options.replica.count, ")"),
                              options.replica.index);
  }
  UseSingleThreadedBlas();
  const int threads = std::max(1, ThreadsOf(options) / options.sharers);
  return std::make_unique<CpuBackend>(options, options.replica, threads, AccountingOf(options));
}

absl::StatusOr<std::vector<std::unique_ptr<Backend>>> CreateCpuMembers(const CpuBackendOptions& options,
                                                                       int count) {
  if (absl::Status status = Check(options); !status.ok()) return status;
  if (count < 1 || count > kMostThreads) {
    return errors::FieldError("cpu_devices", absl::StrCat("be in [1, ", kMostThreads, "]"), count);
  }
  UseSingleThreadedBlas();
  const std::shared_ptr<MemoryAccounting> accounting = AccountingOf(options);
  const int threads = std::max(1, ThreadsOf(options) / count);
  std::vector<std::unique_ptr<Backend>> members;
  for (int i = 0; i < count; ++i) {
    members.push_back(std::make_unique<CpuBackend>(options, Replica{i, count}, threads, accounting));
  }
  return members;
}

}  // namespace lossd::kernels
