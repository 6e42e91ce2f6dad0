// SPDX-License-Identifier: Apache-2.0
// CpuBackend (cpu_backend.h): its memory, heads and options. Behind it, the code that connects the heads of
// several backends: CpuReplicas for heads with the same classes, and JoinCpuClasses for the parts of a split
// head.
//
// Each replica owns a shard of the parameters, which it alone updates. SumGradients adds up a shard's
// gradients at its owner, and SpreadValues copies the values of each shard from its owner to the other
// replicas. A place is the number of a part among the parts of one copy of a split head. The heads of one
// place are replicas of each other: with n places, heads i, i + n, i + 2 n and so on.
#include "kernels/cpu/cpu_backend.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "kernels/cpu/row_loops.h"
#include "kernels/cpu/row_loss.h"
#include "kernels/cpu/threads_and_memory.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"
#include "kernels/validation.h"

namespace lossd::kernels {
namespace {

constexpr int kMostThreads = 1024;

// Memory for slices that the backend allocates.
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

// Memory for slices that the caller owns. Only the count of its bytes belongs to the object.
class AdoptedStaging final : public StagingMemory {
 public:
  AdoptedStaging(absl::Span<uint8_t> memory, MemoryAccounting::Reservation reservation)
      : reservation_(std::move(reservation)), memory_(memory) {}

  absl::Span<uint8_t> bytes() override { return memory_; }

 private:
  const MemoryAccounting::Reservation reservation_;
  const absl::Span<uint8_t> memory_;
};

// The name of a head in errors.
constexpr absl::string_view kTheHead = "the head";

class CpuBackend final : public Backend {
 public:
  // `accounting` may be shared with other backends.
  CpuBackend(const CpuBackendOptions& options, Replica replica, int threads,
             std::shared_ptr<MemoryAccounting> accounting)
      : workspace_bytes_(options.workspace_bytes),
        replica_(replica),
        accounting_(std::move(accounting)),
        teachers_(options.teacher_pool_bytes, accounting_.get()),
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
    LOSSD_TRY(int64_t chunk_rows, ChunkRows(config));
    return PlanBuffers(config, replica_, chunk_rows);
  }

  absl::StatusOr<PlannedHead> PlanWholeHead(const HeadConfig& config,
                                            const MemoryBytes& beside) const override {
    LOSSD_TRY(int64_t chunk_rows, ChunkRows(config));
    PlannedHead planned;
    planned.memory = PlanBuffers(config, replica_, chunk_rows);
    MemoryBytes taken = beside;
    if (config.residency == Residency::kHost) {
      LOSSD_TRY(const MemoryBytes growth, teachers_.GrowthWith(planned.memory[MemoryKind::kHostValues]));
      taken[MemoryKind::kTeacherPool] += growth[MemoryKind::kTeacherPool];
    }
    LOSSD_RETURN_IF_ERROR(accounting_->Check(kTheHead, planned.memory, taken));
    planned.chunk_rows = planned.slice_rows = chunk_rows;
    planned.choices =
        DescribeCpuHead(config, chunk_rows, planned.memory[MemoryKind::kWorkspace], pool_.threads());
    return planned;
  }

  absl::StatusOr<std::unique_ptr<HeadKernels>> CreateHead(const HeadConfig& config) override {
    LOSSD_TRY(int64_t chunk_rows, ChunkRows(config));
    LOSSD_TRY(
        MemoryAccounting::Reservation reservation,
        accounting_->Reserve(kTheHead, PlanBuffers(config, replica_, chunk_rows), /*filled_at_once=*/true));
    std::unique_ptr<CpuPooled> pooled;
    if (config.residency == Residency::kHost) {
      const int64_t bytes = reservation.bytes()[MemoryKind::kHostValues];
      LOSSD_TRY(const TeacherPool::Id id, teachers_.Add(bytes));
      pooled = std::make_unique<CpuPooled>(&teachers_, id, bytes);
    }
    return CpuHead::Create(config, replica_, chunk_rows, &pool_, std::move(reservation), std::move(pooled));
  }

  absl::StatusOr<std::unique_ptr<StagingMemory>> AllocateStaging(int64_t bytes) override {
    return Allocate<StagingMemory, CpuStaging>(MemoryKind::kStaging, bytes);
  }
  absl::StatusOr<std::unique_ptr<StagingMemory>> AdoptStaging(absl::Span<uint8_t> memory,
                                                              const AdoptOptions& options) override {
    MemoryBytes plan;
    plan[MemoryKind::kStaging] = options.counted ? static_cast<int64_t>(memory.size()) : 0;
    LOSSD_TRY(auto reservation, accounting_->Reserve("shared memory", plan));
    return std::make_unique<AdoptedStaging>(memory, std::move(reservation));
  }
  absl::StatusOr<std::unique_ptr<RetainedMemory>> AllocateRetained(int64_t bytes) override {
    return Allocate<RetainedMemory, CpuRetained>(MemoryKind::kRetained, bytes);
  }

  absl::Status PlanHostMemory(MemoryKind kind, int64_t bytes) override {
    MemoryBytes plan;
    plan[kind] = bytes;
    LOSSD_TRY(auto reservation, accounting_->Reserve(absl::StrCat(Name(kind), " memory"), plan));
    absl::MutexLock lock(&planned_mutex_);
    planned_.push_back(std::move(reservation));
    return absl::OkStatus();
  }

 private:
  template <typename Interface, typename Memory>
  absl::StatusOr<std::unique_ptr<Interface>> Allocate(MemoryKind kind, int64_t bytes) {
    if (bytes < 0) return errors::FieldError("bytes", "be >= 0", bytes);
    MemoryBytes plan;
    plan[kind] = bytes;
    LOSSD_TRY(auto reservation, accounting_->Reserve(absl::StrCat(Name(kind), " memory"), plan));
    LOSSD_TRY(AlignedBytes memory, AllocateAligned(bytes));
    return std::make_unique<Memory>(std::move(memory), bytes, std::move(reservation));
  }

  absl::StatusOr<int64_t> ChunkRows(const HeadConfig& config) const {
    LOSSD_RETURN_IF_ERROR(ValidateOn(config, replica_.count));
    return ChunkRowsFor(config, replica_.count,
                        config.workspace_bytes > 0 ? config.workspace_bytes : workspace_bytes_);
  }

  const int64_t workspace_bytes_;
  const Replica replica_;
  const std::shared_ptr<MemoryAccounting> accounting_;
  CpuTeacherPool teachers_;
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
  if (options.teacher_pool_bytes < 0) {
    return errors::FieldError("teacher_pool_bytes", "be >= 0", options.teacher_pool_bytes);
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
  LOSSD_RETURN_IF_ERROR(Check(options));
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
  LOSSD_RETURN_IF_ERROR(Check(options));
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

absl::StatusOr<std::vector<CpuHead*>> CpuPartsOf(absl::Span<HeadKernels* const> heads) {
  std::vector<CpuHead*> parts;
  for (HeadKernels* kernels : heads) {
    auto* const head = dynamic_cast<CpuHead*>(kernels);
    if (head == nullptr) return errors::FieldError("heads", "be heads of CPU backends", "another one");
    const Replica replica = head->params().replica();
    if (replica.index != static_cast<int>(parts.size()) || replica.count != static_cast<int>(heads.size())) {
      return errors::FieldError(absl::StrCat("heads[", parts.size(), "]"),
                                absl::StrCat("be replica ", parts.size(), " of ", heads.size()),
                                absl::StrCat("replica ", replica.index, " of ", replica.count));
    }
    if (!(head->config() == heads.front()->config())) {
      return errors::FieldError(absl::StrCat("heads[", parts.size(), "].config"), "be that of the first",
                                "another one");
    }
    parts.push_back(head);
  }
  return parts;
}

namespace {

// Connects the replicas that have the same classes.
class CpuReplicas final : public Replicas {
 public:
  explicit CpuReplicas(std::vector<CpuParams*> replicas) : replicas_(std::move(replicas)) {}

  absl::Status SumGradients() override {
    for (Param param : kTrainedParams) {
      for (CpuParams* owner : replicas_) SumShard(param, *owner);
    }
    return absl::OkStatus();
  }

  absl::Status SpreadValues() override {
    for (Param param : kTrainedParams) {
      for (CpuParams* owner : replicas_) SpreadShard(param, *owner);
    }
    return absl::OkStatus();
  }

 private:
  // The elements of an owner's shard, relative to the elements of the parameter that each replica keeps.
  struct Range {
    int64_t first;
    int64_t elements;
  };
  static Range RangeOf(Param param, const CpuParams& owner) {
    const ShardRows rows = ShardRowsOf(owner.config(), param, owner.replica());
    const ShardRows kept = StoredRowsOf(owner.config(), {param, Role::kValue}, owner.replica());
    const int64_t cols = ShapeOf(owner.config(), param).cols;
    return {(rows.first - kept.first) * cols, rows.rows * cols};
  }

  // Adds up the owner's shard over all replicas, in blocks. Other replicas' gradients of the shard become 0.
  void SumShard(Param param, CpuParams& owner) {
    if (owner.gradient(param) == nullptr) return;
    const auto [first, elements] = RangeOf(param, owner);
    owner.pool().ParallelFor(elements, kElementGrain, [&, first = first](int64_t begin, int64_t end) {
      for (int64_t from = begin; from < end; from += kSumBlock) {
        SumBlock(param, owner, first + from, std::min(kSumBlock, end - from));
      }
    });
  }

  void SumBlock(Param param, const CpuParams& owner, int64_t from, int64_t n) const {
    std::array<float, kSumBlock> sum{};
    for (const CpuParams* replica : replicas_) {
      float* const part = replica->gradient(param) + from;
      for (int64_t i = 0; i < n; ++i) sum[static_cast<size_t>(i)] += part[i];
      std::fill_n(part, n, 0.0f);
    }
    std::copy_n(sum.begin(), n, owner.gradient(param) + from);
  }

  // Copies the values of the owner's shard to all other replicas.
  void SpreadShard(Param param, CpuParams& owner) {
    const float* const values = owner.value(param);
    if (values == nullptr) return;
    const auto [first, elements] = RangeOf(param, owner);
    for (CpuParams* replica : replicas_) {
      if (replica == &owner) continue;
      owner.pool().ParallelFor(elements, kElementGrain, [&, first = first](int64_t begin, int64_t end) {
        std::memcpy(replica->value(param) + first + begin, values + first + begin,
                    static_cast<size_t>(end - begin) * sizeof(float));
      });
    }
  }

  const std::vector<CpuParams*> replicas_;
};

// Connects the replicas of a head that is split by vocabulary: a CpuReplicas for each part.
class CpuGrid final : public Replicas {
 public:
  explicit CpuGrid(std::vector<CpuReplicas> places) : places_(std::move(places)) {}

  absl::Status SumGradients() override {
    for (CpuReplicas& place : places_) {
      LOSSD_RETURN_IF_ERROR(place.SumGradients());
    }
    return absl::OkStatus();
  }
  absl::Status SpreadValues() override {
    for (CpuReplicas& place : places_) {
      LOSSD_RETURN_IF_ERROR(place.SpreadValues());
    }
    return absl::OkStatus();
  }

 private:
  std::vector<CpuReplicas> places_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Replicas>> MakeCpuReplicas(absl::Span<HeadKernels* const> heads) {
  LOSSD_TRY(std::vector<CpuHead*> parts, CpuPartsOf(heads));
  const auto places = static_cast<size_t>(PlacesOf(heads.front()->config(), static_cast<int>(parts.size())));
  std::vector<std::vector<CpuParams*>> replicas(places);
  for (size_t i = 0; i < parts.size(); ++i) replicas[i % places].push_back(&parts[i]->params());
  std::vector<CpuReplicas> all;
  for (std::vector<CpuParams*>& of_place : replicas) all.emplace_back(std::move(of_place));
  return std::make_unique<CpuGrid>(std::move(all));
}

absl::Status JoinCpuClasses(absl::Span<HeadKernels* const> heads) {
  return JoinTimedCpuClasses(heads, std::make_shared<MemberExchanges>(static_cast<int>(heads.size())));
}

absl::Status JoinTimedCpuClasses(absl::Span<HeadKernels* const> heads,
                                 const std::shared_ptr<MemberExchanges>& clocks) {
  LOSSD_TRY(std::vector<CpuHead*> parts, CpuPartsOf(heads));
  for (CpuHead* head : parts) {
    if (head->config().split != Split::kVocabulary) {
      return errors::FieldError("split", "be vocabulary", Name(head->config().split));
    }
  }
  const int heads_of_all = static_cast<int>(parts.size());
  const int places = PlacesOf(parts.front()->config(), heads_of_all);
  for (int first = 0; first < heads_of_all; first += places) {
    const auto exchange =
        std::make_shared<TimedExchange>(std::make_unique<ThreadExchange>(places), clocks, first);
    for (int i = 0; i < places; ++i) parts[static_cast<size_t>(first + i)]->Join(exchange);
  }
  return absl::OkStatus();
}

}  // namespace lossd::kernels
