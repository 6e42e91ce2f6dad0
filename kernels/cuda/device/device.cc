// SPDX-License-Identifier: Apache-2.0
// Device (device.h): opens a GPU, makes its streams, and runs the completion thread.
#include "kernels/cuda/device/device.h"

#include <pthread.h>

#include <algorithm>
#include <map>
#include <utility>

#include "absl/base/const_init.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/clocks/clock.h"
#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/device/device_branch.h"
#include "kernels/cuda/device/kernel_code.h"
#include "kernels/device_choice.h"
#include "kernels/errors/field_error.h"

namespace lossd::kernels::cuda {
namespace {

constexpr int kOldestCapability = 80;  // major * 10 + minor

std::string VersionName(int version) { return absl::StrCat(version / 1000, ".", version % 1000 / 10); }

// From now on, threads of this process that wait for the GPU sleep instead of spinning.
absl::Status SleepInWaits() {
  unsigned flags = 0;
  LOSSD_RETURN_IF_CUDA_ERROR(cudaGetDeviceFlags(&flags), "cudaGetDeviceFlags");
  flags = (flags & ~static_cast<unsigned>(cudaDeviceScheduleMask)) | cudaDeviceScheduleBlockingSync;
  return ToStatus(cudaSetDeviceFlags(flags), "cudaSetDeviceFlags");
}

// The number of GPUs, or the reason why none can be used.
absl::StatusOr<int> CountDevices() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorInsufficientDriver) {
    int driver = 0;
    cudaDriverGetVersion(&driver);
    return absl::UnavailableError(
        driver == 0 ? std::string("no NVIDIA driver is installed")
                    : absl::StrCat("the NVIDIA driver is too old: it supports CUDA ", VersionName(driver),
                                   ", this program needs ", VersionName(CUDART_VERSION)));
  }
  if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0)) {
    return absl::UnavailableError("no CUDA GPU was found");
  }
  if (error != cudaSuccess) return ToStatus(error, "cudaGetDeviceCount");
  return count;
}

absl::Status ValidateOptions(const CudaBackendOptions& options, int device_count) {
  if (options.device < 0 || options.device >= device_count) {
    return errors::FieldError("device",
                              absl::StrCat("be in [0, ", device_count, ") (GPUs found: ", device_count, ")"),
                              options.device);
  }
  if (options.workspace_bytes < 0) {
    return errors::FieldError("workspace_bytes", "be >= 0", options.workspace_bytes);
  }
  if (options.memory_limit_bytes < 0) {
    return errors::FieldError("memory_limit_bytes", "be >= 0", options.memory_limit_bytes);
  }
  if (options.teacher_pool_bytes < 0) {
    return errors::FieldError("teacher_pool_bytes", "be >= 0", options.teacher_pool_bytes);
  }
  if (options.max_chunk_rows < 1) {
    return errors::FieldError("max_chunk_rows", "be >= 1", options.max_chunk_rows);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<std::string>> GpuUuids() {
  const absl::StatusOr<int> count = CountDevices();
  if (!count.ok()) return count.status();
  std::vector<std::string> uuids;
  for (int device = 0; device < *count; ++device) {
    cudaDeviceProp properties = {};
    LOSSD_RETURN_IF_CUDA_ERROR(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    uuids.push_back(GpuUuidText(properties.uuid.bytes));
  }
  return uuids;
}

absl::StatusOr<Event> Event::Create(bool timing) {
  Event event;
  const unsigned flags = cudaEventBlockingSync | (timing ? 0u : unsigned{cudaEventDisableTiming});
  LOSSD_RETURN_IF_CUDA_ERROR(cudaEventCreateWithFlags(&event.event_, flags), "cudaEventCreateWithFlags");
  return event;
}

absl::Status WaitFor(const Event& event) {
  cudaError_t state = cudaErrorNotReady;
  const auto happened = [&] {
    state = cudaEventQuery(event.get());
    return state != cudaErrorNotReady;
  };
  if (clocks::AskBeforeSleeping(happened)) return ToStatus(state, "cudaEventQuery");
  return ToStatus(cudaEventSynchronize(event.get()), "cudaEventSynchronize");
}

Event::~Event() {
  if (event_ != nullptr) cudaEventDestroy(event_);
}

absl::StatusOr<cudaStream_t> StreamApart() {
  static absl::Mutex mutex(absl::kConstInit);
  static auto& streams = *new std::map<int, cudaStream_t>;  // by GPU; guarded by mutex
  int device = 0;
  LOSSD_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device), "cudaGetDevice");
  absl::MutexLock lock(&mutex);
  cudaStream_t& stream = streams[device];
  if (stream == nullptr) {
    LOSSD_RETURN_IF_CUDA_ERROR(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                               "cudaStreamCreateWithFlags");
  }
  return stream;
}

namespace {

// Calls `enqueue` with StreamApart(), and waits for the work that it enqueues.
absl::Status WaitApart(absl::FunctionRef<absl::Status(cudaStream_t)> enqueue) {
  const absl::StatusOr<cudaStream_t> stream = StreamApart();
  if (!stream.ok()) return stream.status();
  LOSSD_RETURN_IF_ERROR(enqueue(*stream));
  return ToStatus(cudaStreamSynchronize(*stream), "cudaStreamSynchronize");
}

}  // namespace

absl::Status CopyAndWait(void* to, const void* from, int64_t bytes) {
  return WaitApart([&](cudaStream_t stream) { return Copy(to, from, bytes, stream); });
}

absl::Status ZeroAndWait(void* data, int64_t bytes) {
  return WaitApart([&](cudaStream_t stream) { return Zero(data, bytes, stream); });
}

absl::StatusOr<std::unique_ptr<Device>> Device::Open(const CudaBackendOptions& options,
                                                     FindKernelLimits find_kernel_limits) {
  const absl::StatusOr<int> count = CountDevices();
  if (!count.ok()) return count.status();
  LOSSD_RETURN_IF_ERROR(ValidateOptions(options, *count));
  LOSSD_RETURN_IF_CUDA_ERROR(cudaSetDevice(options.device), "cudaSetDevice");
  if (!options.shares_process) LOSSD_RETURN_IF_ERROR(SleepInWaits());
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  LOSSD_RETURN_IF_CUDA_ERROR(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
  CudaBackendOptions resolved = options;
  if (options.shares_process)
    // A graph that branches waits for all work on the GPU, the work of the process's other code included.
    resolved.host_branches = true;
  if (resolved.workspace_bytes == 0) {
    resolved.workspace_bytes = std::min(kDefaultWorkspace, static_cast<int64_t>(free_bytes / 4));
  }
  std::unique_ptr<Device> device(new Device(resolved, options.memory_limit_bytes));
  LOSSD_RETURN_IF_ERROR(device->Start(find_kernel_limits));
  return device;
}

absl::Status Device::Start(FindKernelLimits find_kernel_limits) {
  cudaDeviceProp properties = {};
  LOSSD_RETURN_IF_CUDA_ERROR(cudaGetDeviceProperties(&properties, options_.device),
                             "cudaGetDeviceProperties");
  const int capability = properties.major * 10 + properties.minor;
  if (capability < kOldestCapability) {
    return absl::UnavailableError(absl::StrCat("device: ", properties.name, " has compute capability ",
                                               properties.major, ".", properties.minor, ", 8.0 is needed"));
  }
  limits_.multiprocessors = properties.multiProcessorCount;
  // The device's limit is for static and dynamic shared memory together; 2 KiB are left for the static one.
  limits_.shared_bytes_per_block = static_cast<int>(properties.sharedMemPerBlockOptin) - (2 << 10);
  limits_.shared_bytes_per_sm = static_cast<int>(properties.sharedMemPerMultiprocessor);
  limits_.has_clusters = capability >= 90;
  limits_.is_hopper = capability == 90;
  int mps = 0;
  LOSSD_RETURN_IF_CUDA_ERROR(cudaDeviceGetAttribute(&mps, cudaDevAttrMpsEnabled, options_.device),
                             "cudaDeviceGetAttribute");
  limits_.shared_by_mps = mps != 0;
  find_kernel_limits(limits_);
  int driver = 0;
  LOSSD_RETURN_IF_CUDA_ERROR(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  limits_.has_branches = options_.host_branches || driver >= kBranchDriverVersion;
  description_ = absl::StrCat("cuda:", options_.device, " ", properties.name);
  uuid_ = GpuUuidText(properties.uuid.bytes);
  LOSSD_RETURN_IF_ERROR(CreateStreams());
  absl::StatusOr<std::unique_ptr<Gemms>> gemms = Gemms::Create();
  if (!gemms.ok()) return gemms.status();
  gemms_ = *std::move(gemms);
  absl::StatusOr<DeviceBuffer> workspace =
      DeviceBuffer::Allocate(&ledger_, MemoryKind::kWorkspace, kGemmWorkspaceBytes);
  if (!workspace.ok()) return workspace.status();
  gemm_workspace_ = *std::move(workspace);
  if (options_.shares_process) {  // code that is loaded later would wait for all work on the GPU
    LOSSD_RETURN_IF_ERROR(LoadKernelCode());
    gemms_->TakeSteps();
  }
  completion_thread_ = std::thread([this] { CompletionLoop(); });
  return absl::OkStatus();
}

absl::Status Device::CreateStreams() {
  const StreamPriority wanted = options_.stream_priority;
  int least = 0, greatest = 0;
  LOSSD_RETURN_IF_CUDA_ERROR(cudaDeviceGetStreamPriorityRange(&least, &greatest),
                             "cudaDeviceGetStreamPriorityRange");
  const auto create = [](cudaStream_t& stream, int priority) {
    return ToStatus(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority),
                    "cudaStreamCreateWithPriority");
  };
  for (cudaStream_t* const stream : {&compute_, &upload_, &download_}) {
    LOSSD_RETURN_IF_ERROR(create(*stream, wanted == StreamPriority::kNone ? least : greatest));
  }
  current_ = compute_;
  if (wanted != StreamPriority::kHiddenGradients || least == greatest) return absl::OkStatus();
  LOSSD_RETURN_IF_ERROR(Take(Event::Create(), fork_));
  return create(background_, least);
}

// The background stream begins behind the work of compute_ (fork_), and compute_ continues behind it
// (`done`). So the order of the work is that of one stream, and a wait for compute_ is also a wait for
// background_.
absl::Status Device::InBackground(const Event& done, absl::FunctionRef<absl::Status()> enqueue) {
  if (background_ == nullptr) {
    LOSSD_RETURN_IF_ERROR(enqueue());
    return Record(done, compute_);
  }
  LOSSD_RETURN_IF_ERROR(Record(fork_, compute_));
  LOSSD_RETURN_IF_ERROR(Await(fork_, background_));
  current_ = background_;
  absl::Status status = enqueue();
  current_ = compute_;
  LOSSD_RETURN_IF_ERROR(status);
  LOSSD_RETURN_IF_ERROR(Record(done, background_));
  return Await(done, compute_);
}

Device::~Device() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  if (completion_thread_.joinable()) completion_thread_.join();
  cudaSetDevice(options_.device);
  gemms_.reset();
  for (cudaStream_t stream : {compute_, background_, upload_, download_}) {
    if (stream != nullptr) cudaStreamDestroy(stream);
  }
}

absl::Status Device::MakeCurrent() const {
  {
    absl::MutexLock lock(&mutex_);
    if (!failure_.ok()) return failure_;
  }
  return ToStatus(cudaSetDevice(options_.device), "cudaSetDevice");
}

absl::Status Device::Fail(absl::Status status) {
  absl::MutexLock lock(&mutex_);
  if (failure_.ok() && absl::IsUnavailable(status)) failure_ = status;
  return status;
}

absl::Status Device::Synchronize() {
  for (cudaStream_t stream : {upload_, compute_, download_}) {
    if (const cudaError_t error = cudaStreamSynchronize(stream); error != cudaSuccess) {
      return Fail(ToStatus(error, "cudaStreamSynchronize"));
    }
  }
  return absl::OkStatus();
}

absl::Status Device::Drain(absl::Status failure) const {
  const absl::Time end = clocks::SteadyNow() + kDrainLimit;
  for (cudaStream_t stream : {upload_, compute_, download_}) {
    while (cudaStreamQuery(stream) == cudaErrorNotReady) {
      if (clocks::SteadyNow() >= end) {
        return absl::Status(failure.code(), absl::StrCat(failure.message(), "; and ", description_,
                                                         " has not ended its work ",
                                                         absl::FormatDuration(kDrainLimit), " later"));
      }
      absl::SleepFor(absl::Milliseconds(1));
    }
  }
  return failure;
}

void Device::Enqueue(Completion completion) {
  absl::MutexLock lock(&mutex_);
  ++in_flight_;
  queue_.push_back(std::move(completion));
}

int Device::in_flight() const {
  absl::MutexLock lock(&mutex_);
  return in_flight_;
}

void Device::CompletionLoop() {
  pthread_setname_np(pthread_self(), absl::StrCat("lossd-done-", options_.device).substr(0, 15).c_str());
  cudaSetDevice(options_.device);
  for (;;) {
    Completion next;
    {
      absl::MutexLock lock(&mutex_);
      const auto ready = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return stopping_ || !queue_.empty(); };
      mutex_.Await(absl::Condition(&ready));
      if (queue_.empty()) return;
      next = std::move(queue_.front());
      queue_.pop_front();
    }
    next.results();
    next.wait_done();
    // Before `done` is reported, so that the caller may submit the next chunk at once.
    {
      absl::MutexLock lock(&mutex_);
      --in_flight_;
    }
    next.done();
  }
}

}  // namespace lossd::kernels::cuda
