// SPDX-License-Identifier: Apache-2.0
// One GPU (Device), events and copies on its streams, retained hidden states (CudaRetained), and what GPUs
// exchange while they compute a chunk of a head that is split by vocabulary (ClassExchange).
#ifndef LOSSD_KERNELS_CUDA_DEVICE_DEVICE_H_
#define LOSSD_KERNELS_CUDA_DEVICE_DEVICE_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/cuda/cuda_options.h"
#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/device/device_limits.h"
#include "kernels/cuda/device/device_memory.h"
#include "kernels/cuda/device/gemm.h"
#include "kernels/exchange_times.h"

namespace lossd::kernels::cuda {

// Enqueues a copy; each side is memory of the host or of the device.
inline absl::Status Copy(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
  return ToStatus(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream),
                  "cudaMemcpyAsync");
}

// Enqueues zeros.
inline absl::Status Zero(void* data, int64_t bytes, cudaStream_t stream) {
  return ToStatus(cudaMemsetAsync(data, 0, static_cast<size_t>(bytes), stream), "cudaMemsetAsync");
}

// A stream of the current GPU for copies that a thread waits for, where no stream of a Device is at hand. It
// waits for no other stream, and none waits for it. The default stream and a thread's own do not suit: other
// code of the process may have work on them that ends only after ours, such as a trainer's collective that
// waits for another rank. Made once for each GPU, for the life of the process. Thread-safe.
absl::StatusOr<cudaStream_t> StreamApart();

// Copies on StreamApart(), each side memory of the host or of the current GPU, and waits. Thread-safe.
absl::Status CopyAndWait(void* to, const void* from, int64_t bytes);
// Zeroes memory of the current GPU on StreamApart(), and waits. Thread-safe.
absl::Status ZeroAndWait(void* data, int64_t bytes);

// The UUIDs of the visible GPUs, by index. UNAVAILABLE without any.
absl::StatusOr<std::vector<std::string>> GpuUuids();

// Owns an event; waiting for it blocks instead of spinning. Without timing unless it is asked for.
class Event {
 public:
  Event() = default;
  static absl::StatusOr<Event> Create(bool timing = false);
  Event(Event&& other) noexcept : event_(other.event_) { other.event_ = nullptr; }
  Event& operator=(Event&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  ~Event();
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

inline absl::Status Record(const Event& event, cudaStream_t stream) {
  return ToStatus(cudaEventRecord(event.get(), stream), "cudaEventRecord");
}

// What is enqueued on `stream` from now on waits for the event.
inline absl::Status Await(const Event& event, cudaStream_t stream) {
  return ToStatus(cudaStreamWaitEvent(stream, event.get(), 0), "cudaStreamWaitEvent");
}

// Retained hidden states of the CUDA backend: device memory. Thread-compatible, as RetainedMemory says.
class CudaRetained final : public RetainedMemory {
 public:
  // `bytes` of the buffer, which lies on GPU `device`, are used; it may be longer.
  CudaRetained(int device, DeviceBuffer buffer, int64_t bytes)
      : device_(device), buffer_(std::move(buffer)), bytes_(bytes) {}

  int64_t size() const override { return bytes_; }
  uint8_t* data() const { return buffer_.data(); }  // on the device
  absl::Status ReadBytes(int64_t offset, absl::Span<uint8_t> out) const override {
    LOSSD_RETURN_IF_CUDA_ERROR(cudaSetDevice(device_), "cudaSetDevice");
    return CopyAndWait(out.data(), data() + offset, static_cast<int64_t>(out.size()));
  }
  absl::Status WriteBytes(int64_t offset, absl::Span<const uint8_t> in) override {
    LOSSD_RETURN_IF_CUDA_ERROR(cudaSetDevice(device_), "cudaSetDevice");
    return CopyAndWait(data() + offset, in.data(), static_cast<int64_t>(in.size()));
  }

 private:
  const int device_;
  const DeviceBuffer buffer_;
  const int64_t bytes_;
};

// One GPU: its streams, memory ledger, GEMMs, the thread that reports finished chunks, and whether it still
// works.
//
// Streams: `upload` and `download` copy and convert rows, `compute` does everything else, in submission
// order. Their kernels go before those of other streams that wait for a multiprocessor (StreamPriority), but
// for work that is enqueued InBackground. Threads that wait for the GPU sleep.
//
// Members are thread-safe where their comment says so; the others belong to the backend's driving thread.
class Device {
 public:
  static constexpr int kMaxChunksInFlight = 2;
  static constexpr absl::Duration kDrainLimit = absl::Seconds(10);

  // Fills in what only kernels know of the current device: fused_clusters and cluster_order.
  using FindKernelLimits = void (*)(DeviceLimits&);
  // As CreateCudaBackend.
  static absl::StatusOr<std::unique_ptr<Device>> Open(const CudaBackendOptions& options,
                                                      FindKernelLimits find_kernel_limits);
  ~Device();

  const CudaBackendOptions& options() const { return options_; }   // thread-safe; workspace_bytes is set
  const DeviceLimits& limits() const { return limits_; }           // thread-safe
  const std::string& description() const { return description_; }  // thread-safe
  const std::string& uuid() const { return uuid_; }                // thread-safe; "GPU-..."
  MemoryLedger& ledger() { return ledger_; }                       // thread-safe
  const MemoryLedger& ledger() const { return ledger_; }           // thread-safe
  Gemms& gemms() { return *gemms_; }

  cudaStream_t compute() const { return current_; }
  cudaStream_t upload() const { return upload_; }
  cudaStream_t download() const { return download_; }
  // Calls `enqueue`, which enqueues work on compute() that nobody waits for: it comes after what is there
  // already and before what comes later, as other work does, but does not go before that of other streams.
  // `done` happens when it has ended.
  absl::Status InBackground(const Event& done, absl::FunctionRef<absl::Status()> enqueue);
  void* gemm_workspace() const { return gemm_workspace_.data(); }

  // Makes this device current for the calling thread and says whether it is still usable. Thread-safe.
  absl::Status Enter() const;
  // Remembers a failure after which the device cannot be trusted (UNAVAILABLE); returns `status`.
  // Thread-safe.
  absl::Status Fail(absl::Status status);
  // Waits until all streams are idle.
  absl::Status Synchronize();
  // Waits until all streams have done what was enqueued before a failure, or have failed, so that nothing is
  // copied from or to memory of callers any more. Returns `failure`; after kDrainLimit it says that the GPU
  // has not come to an end. Thread-safe; the device is the calling thread's.
  absl::Status Drain(absl::Status failure) const;

  // What the completion thread does for one chunk: `results` waits for and reports the results, `done` the
  // end of the chunk; between them and after, in_flight() counts the chunk until `done` has waited.
  struct Completion {
    absl::AnyInvocable<void()> results;
    absl::AnyInvocable<void()> wait_done;
    absl::AnyInvocable<void()> done;
  };
  void Enqueue(Completion completion);
  int in_flight() const;  // thread-safe

 private:
  Device(const CudaBackendOptions& options, int64_t limit_bytes) : options_(options), ledger_(limit_bytes) {}
  absl::Status Start(FindKernelLimits find_kernel_limits);
  absl::Status CreateStreams();
  void CompletionLoop();

  CudaBackendOptions options_;
  DeviceLimits limits_;
  std::string description_;
  std::string uuid_;
  MemoryLedger ledger_;
  std::unique_ptr<Gemms> gemms_;
  DeviceBuffer gemm_workspace_;
  cudaStream_t compute_ = nullptr;
  cudaStream_t background_ = nullptr;  // null: compute_ does its work
  cudaStream_t current_ = nullptr;     // one of the two
  Event fork_;                         // where background_ begins
  cudaStream_t upload_ = nullptr;
  cudaStream_t download_ = nullptr;

  mutable absl::Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  std::deque<Completion> queue_ ABSL_GUARDED_BY(mutex_);
  int in_flight_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread completion_thread_;
};

// Rows [begin, end).
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;
};

// What the parts of a head that is split by vocabulary exchange while a chunk is computed. Each part is on a
// device of its own. Every part calls the same functions with the same sizes in the same order, from the
// thread that drives its device, and each call enqueues on the device's compute stream; the completion thread
// calls Wait, and any thread may call Abort.
//
// Errors: UNAVAILABLE. After an error of one part no part can go on: the part has to Abort, so that the
// others do not wait for it.
class ClassExchange {
 public:
  virtual ~ClassExchange() = default;

  // data [n] becomes the sum over all parts. `kind`: what its time counts as.
  virtual absl::Status Sum(ExchangeKind kind, float* data, int64_t n) = 0;
  // all [parts, bytes]: `own` of each part.
  virtual absl::Status Gather(const void* own, void* all, int64_t bytes) = 0;
  // Of so many rows, those whose sums SumRows leaves with this part. Every row has one part.
  virtual RowRange RowsHere(int64_t rows) const = 0;
  // data [rows, cols], with room for as many rows as the parts divide evenly: RowsHere become the sums over
  // all parts. The others are unspecified.
  virtual absl::Status SumRows(float* data, int64_t rows, int64_t cols) = 0;

  // Calls `enqueue`, which enqueues a chunk, and sees to it that it comes back when another part stays away.
  virtual absl::Status Watched(absl::FunctionRef<absl::Status()> enqueue) = 0;
  // Waits until the event has happened, or until it cannot any more.
  virtual absl::Status Wait(const Event& event) = 0;
  // No exchange of any part happens from now on.
  virtual void Abort(const absl::Status& reason) = 0;
};

// For a head that has all classes: there is nothing to exchange.
class SoleExchange final : public ClassExchange {
 public:
  absl::Status Sum(ExchangeKind, float*, int64_t) override { return absl::OkStatus(); }
  absl::Status Gather(const void*, void*, int64_t) override { return absl::OkStatus(); }
  RowRange RowsHere(int64_t rows) const override { return {0, rows}; }
  absl::Status SumRows(float*, int64_t, int64_t) override { return absl::OkStatus(); }
  absl::Status Watched(absl::FunctionRef<absl::Status()> enqueue) override { return enqueue(); }
  absl::Status Wait(const Event& event) override {
    return ToStatus(cudaEventSynchronize(event.get()), "cudaEventSynchronize");
  }
  void Abort(const absl::Status&) override {}
};

// The exchange of a head, which is connected after the head has been made.
struct ClassLink {
  std::unique_ptr<ClassExchange> exchange = std::make_unique<SoleExchange>();
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_DEVICE_DEVICE_H_
