// SPDX-License-Identifier: Apache-2.0
// CudaBackend: the backend of one GPU (cuda_backend.h). It checks that heads and memory fit, and then makes
// them. Links and replica groups are in heads/cuda_link.cc.
#include "kernels/cuda/cuda_backend.h"

#include <cuda_runtime_api.h>

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/backend.h"
#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/device/device_memory.h"
#include "kernels/cuda/device/shared_device_memory.h"
#include "kernels/cuda/heads/cuda_head.h"
#include "kernels/cuda/heads/cuda_teacher_pool.h"
#include "kernels/cuda/heads/head_memory.h"
#include "kernels/cuda/kernels/hopper/cluster_launch.h"
#include "kernels/cuda/kernels/hopper/logit_pass.h"
#include "kernels/device_choice.h"
#include "kernels/errors/field_error.h"
#include "kernels/host_memory.h"

namespace lossd::kernels {
namespace cuda {
namespace {

// Pinned host memory that the backend allocates.
class PinnedStaging : public StagingMemory {
 public:
  PinnedStaging(PinnedBuffer buffer, int64_t bytes) : buffer_(std::move(buffer)), bytes_(bytes) {}
  absl::Span<uint8_t> bytes() override { return {buffer_.data(), static_cast<size_t>(bytes_)}; }

 private:
  PinnedBuffer buffer_;
  const int64_t bytes_;
};

// Host memory that the caller owns. It is pinned for all GPUs of the process while the object lives.
// `counted`: whether the ledger counts the memory.
class AdoptedStaging : public StagingMemory {
 public:
  static absl::StatusOr<std::unique_ptr<StagingMemory>> Create(MemoryLedger* ledger,
                                                               absl::Span<uint8_t> memory, bool counted) {
    const cudaError_t error = cudaHostRegister(memory.data(), memory.size(), cudaHostRegisterPortable);
    if (error != cudaSuccess) {
      cudaGetLastError();  // the device stays usable; forget the error
      return ToStatus(error, absl::StrCat("cudaHostRegister of ", errors::ExactBytes(memory.size())));
    }
    return std::unique_ptr<StagingMemory>(new AdoptedStaging(ledger, memory, counted));
  }
  ~AdoptedStaging() override {
    cudaHostUnregister(memory_.data());
    ledger_->Remove(MemoryKind::kStaging, counted_bytes_);
  }
  AdoptedStaging(const AdoptedStaging&) = delete;
  AdoptedStaging& operator=(const AdoptedStaging&) = delete;

  absl::Span<uint8_t> bytes() override { return memory_; }

 private:
  AdoptedStaging(MemoryLedger* ledger, absl::Span<uint8_t> memory, bool counted)
      : ledger_(ledger), memory_(memory), counted_bytes_(counted ? static_cast<int64_t>(memory.size()) : 0) {
    ledger_->Add(MemoryKind::kStaging, counted_bytes_);
  }

  MemoryLedger* const ledger_;
  const absl::Span<uint8_t> memory_;
  const int64_t counted_bytes_;
};

// "weights 4.2 GiB, gradients ..." for the error that refuses a head.
std::string DescribePlan(const MemoryBytes& plan) {
  std::string text;
  for (size_t i = 0; i < kMemoryKinds; ++i) {
    absl::StrAppend(&text, i == 0 ? "" : ", ", Name(static_cast<MemoryKind>(i)), " ",
                    errors::HumanBytes(static_cast<double>(plan.by_kind[i])));
  }
  return text;
}

int64_t DeviceTotal(const MemoryBytes& plan) { return plan.OnDevice(); }

// The backend of one GPU. `teachers_` has the memory of heads that live in host memory.
class CudaBackend : public Backend {
 public:
  explicit CudaBackend(std::unique_ptr<Device> device)
      : device_(std::move(device)), teachers_(device_.get(), device_->options().teacher_pool_bytes) {}

  BackendInfo info() const override {
    return {"cuda",
            device_->description(),
            DType::kBFloat16,
            {device_->uuid()},
            device_->limits().shared_by_mps,
            GpuSharing(device_->limits().shared_by_mps)};
  }
  MemoryStats memory() const override { return device_->ledger().stats(); }
  int max_chunks_in_flight() const override { return Device::kMaxChunksInFlight; }

  absl::StatusOr<MemoryBytes> PlanHead(const HeadConfig& config) const override {
    const absl::StatusOr<cuda::HeadPlan> plan = MakePlan(config);
    if (!plan.ok()) return plan.status();
    return plan->memory;
  }

  absl::StatusOr<PlannedHead> PlanWholeHead(const HeadConfig& config,
                                            const MemoryBytes& beside) const override {
    const absl::StatusOr<cuda::HeadPlan> plan = MakePlan(config);
    if (!plan.ok()) return plan.status();
    LOSSD_RETURN_IF_ERROR(device_->MakeCurrent());
    LOSSD_RETURN_IF_ERROR(CheckHead(config, *plan, DeviceTotal(beside)));
    PlannedHead planned;
    planned.memory = plan->memory;
    planned.compute_dtype = config.compute_dtype;
    planned.chunk_rows = planned.slice_rows = plan->sizes.chunk_rows;
    planned.choices = plan->choices;
    return planned;
  }

  absl::StatusOr<std::unique_ptr<HeadKernels>> CreateHead(const HeadConfig& config) override {
    const absl::StatusOr<cuda::HeadPlan> plan = MakePlan(config);
    if (!plan.ok()) return plan.status();
    LOSSD_RETURN_IF_ERROR(device_->MakeCurrent());
    LOSSD_RETURN_IF_ERROR(CheckHead(config, *plan));
    absl::StatusOr<std::unique_ptr<HeadKernels>> head = CudaHead::Create(device_.get(), &teachers_, config);
    if (absl::IsResourceExhausted(head.status())) {
      return absl::ResourceExhaustedError(
          absl::StrCat(head.status().message(), "; the head's plan: ", DescribePlan(plan->memory)));
    }
    return head;
  }

  absl::StatusOr<std::unique_ptr<StagingMemory>> AllocateStaging(int64_t bytes) override {
    if (bytes < 0) return errors::FieldError("bytes", "be >= 0", bytes);
    LOSSD_RETURN_IF_ERROR(device_->MakeCurrent());
    absl::StatusOr<PinnedBuffer> buffer = PinnedBuffer::Allocate(&device_->ledger(), bytes);
    if (!buffer.ok()) return buffer.status();
    return std::make_unique<PinnedStaging>(*std::move(buffer), bytes);
  }

  absl::StatusOr<std::unique_ptr<StagingMemory>> AdoptStaging(absl::Span<uint8_t> memory,
                                                              const AdoptOptions& options) override {
    LOSSD_RETURN_IF_ERROR(device_->MakeCurrent());
    return AdoptedStaging::Create(&device_->ledger(), memory, options.counted);
  }

  std::vector<std::string> SharingDevices() const override {
    return device_->uuid().empty() ? std::vector<std::string>() : std::vector<std::string>{device_->uuid()};
  }
  absl::Status ReachDeviceMemory(absl::Span<uint8_t> memory) override {
    return cuda::ReachDeviceMemory(device_.get(), memory);
  }
  absl::StatusOr<std::unique_ptr<SharedDeviceMemory>> ShareDeviceMemory(absl::string_view device,
                                                                        int64_t bytes) override {
    if (device != device_->uuid())
      return errors::FieldError("device", absl::StrCat("be ", device_->uuid()), device);
    if (bytes <= 0) return errors::FieldError("bytes", "be > 0", bytes);
    LOSSD_RETURN_IF_ERROR(device_->MakeCurrent());
    MemoryBytes plan;
    plan[MemoryKind::kSlots] = RoundUp(bytes, kDevicePage);
    LOSSD_RETURN_IF_ERROR(CheckFits("memory shared with a client", plan));
    return cuda::ShareDeviceMemory(device_.get(), bytes);
  }

  absl::StatusOr<std::unique_ptr<RetainedMemory>> AllocateRetained(int64_t bytes) override {
    if (bytes < 0) return errors::FieldError("bytes", "be >= 0", bytes);
    LOSSD_RETURN_IF_ERROR(device_->MakeCurrent());
    absl::StatusOr<DeviceBuffer> buffer =
        DeviceBuffer::Allocate(&device_->ledger(), MemoryKind::kRetained, bytes);
    if (!buffer.ok()) return buffer.status();
    return std::make_unique<CudaRetained>(device_->options().device, *std::move(buffer), bytes);
  }

  absl::Status PlanHostMemory(MemoryKind kind, int64_t bytes) override {
    device_->ledger().Add(kind, bytes);
    return absl::OkStatus();
  }

 private:
  absl::StatusOr<cuda::HeadPlan> MakePlan(const HeadConfig& config) const {
    const CudaBackendOptions& options = device_->options();
    return cuda::PlanHead(config, {.limits = device_->limits(),
                                   .workspace_bytes = options.workspace_bytes,
                                   .max_chunk_rows = options.max_chunk_rows,
                                   .fused_loss = options.fused_loss,
                                   .replica = options.replica});
  }

  // Checks that the head fits. For a head in host memory, counts what the pool would take for it, and checks
  // that the host has room for its values.
  absl::Status CheckHead(const HeadConfig& config, const cuda::HeadPlan& plan, int64_t beside = 0) const {
    MemoryBytes memory = plan.memory;
    if (config.residency == Residency::kHost) {
      const HostedBytes bytes = HostedBytes::Of(config, plan.sizes, device_->limits().multiprocessors);
      const absl::StatusOr<MemoryBytes> growth = teachers_.GrowthWith(bytes);
      if (!growth.ok()) return growth.status();
      memory[MemoryKind::kTeacherPool] = (*growth)[MemoryKind::kTeacherPool];
      LOSSD_RETURN_IF_ERROR(CheckHost(memory[MemoryKind::kHostValues]));
    }
    return CheckFits("the head", memory, beside);
  }

  absl::Status CheckHost(int64_t bytes) const {
    const std::optional<HostMemory::Bound> host = HostMemory().Available();
    const int64_t reserve = device_->options().memory_reserve_bytes;
    if (!host.has_value() || bytes <= host->bytes - reserve) return absl::OkStatus();
    return absl::ResourceExhaustedError(
        absl::StrCat("the head needs ", errors::ExactBytes(bytes), " of host memory for its values; ",
                     host->what, ", and memory_reserve_bytes keeps ", errors::ExactBytes(reserve), " free"));
  }

  // Checks that the device has room for the plan, within the limit. `beside`: device memory that other plans
  // will take before.
  absl::Status CheckFits(absl::string_view what, const MemoryBytes& plan, int64_t beside = 0) const {
    const int64_t needed = DeviceTotal(plan);
    const int64_t limit = device_->options().memory_limit_bytes;
    const int64_t used = device_->ledger().device_bytes() + beside;
    if (limit > 0 && used + needed > limit) {
      return absl::ResourceExhaustedError(absl::StrCat(
          what, " needs ", errors::ExactBytes(needed), " of device memory: ", DescribePlan(plan), "; ",
          errors::ExactBytes(used), " of the limit of ", errors::ExactBytes(limit), " are in use"));
    }
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    LOSSD_RETURN_IF_CUDA_ERROR(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
    if (needed + beside > static_cast<int64_t>(free_bytes)) {
      return absl::ResourceExhaustedError(absl::StrCat(
          what, " needs ", errors::ExactBytes(needed), " of device memory: ", DescribePlan(plan), "; ",
          errors::ExactBytes(free_bytes), " of ", errors::ExactBytes(total_bytes), " are free"));
    }
    return absl::OkStatus();
  }

  std::unique_ptr<Device> device_;
  CudaTeacherPool teachers_;
};

// Asks the kernels of Hopper for the limits of the current device.
void FindKernelLimits(DeviceLimits& limits) {
  if (!limits.is_hopper) return;
  limits.fused_clusters = hopper::LogitPassClusters();
  limits.cluster_order = hopper::FindClusterOrder();
}

}  // namespace
}  // namespace cuda

absl::StatusOr<std::vector<std::string>> VisibleGpuUuids() { return cuda::GpuUuids(); }

int GpuOf(const void* memory) {
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, memory) == cudaSuccess) {
    return attributes.type == cudaMemoryTypeDevice ? attributes.device : -1;
  }
  cudaGetLastError();  // clears the error, which the thread's next check would report
  return -1;
}

absl::StatusOr<std::unique_ptr<Backend>> CreateCudaBackend(const CudaBackendOptions& options) {
  absl::StatusOr<std::unique_ptr<cuda::Device>> device = cuda::Device::Open(options, cuda::FindKernelLimits);
  if (!device.ok()) return device.status();
  return std::make_unique<cuda::CudaBackend>(*std::move(device));
}

}  // namespace lossd::kernels
