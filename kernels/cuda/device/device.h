// SPDX-License-Identifier: Apache-2.0
// Device: one GPU, with its streams, memory ledger and completion thread. Also: events and copies on streams,
// retained hidden states (CudaRetained), and the interface by which GPUs exchange data while they compute a
// chunk of a head that is split by vocabulary (ClassExchange).
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

// Enqueues a copy. `to` and `from` are each memory of the host or of the device.
inline absl::Status Copy(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
  return ToStatus(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream),
                  "cudaMemcpyAsync");
}

// Enqueues zeros.
inline absl::Status Zero(void* data, int64_t bytes, cudaStream_t stream) {
  return ToStatus(cudaMemsetAsync(data, 0, static_cast<size_t>(bytes), stream), "cudaMemsetAsync");
}

// A stream of the current GPU for copies that a thread waits for, in code that has no Device. It waits for no
// other stream, and no other stream waits for it. The default stream and a thread's own stream are not used
// for this: other code of the process may have work on them that ends only after ours, such as a trainer's
// collective that waits for another rank. Each GPU gets one such stream, which lives as long as the process.
// Thread-safe.
absl::StatusOr<cudaStream_t> StreamApart();

// Copies on StreamApart(), and waits for the copy. `to` and `from` are each memory of the host or of the
// current GPU. Thread-safe.
absl::Status CopyAndWait(void* to, const void* from, int64_t bytes);
// Zeroes memory of the current GPU on StreamApart(), and waits. Thread-safe.
absl::Status ZeroAndWait(void* data, int64_t bytes);

// The UUIDs of the visible GPUs, by index. UNAVAILABLE if there is none.
absl::StatusOr<std::vector<std::string>> GpuUuids();

// Owns a CUDA event. A thread that waits for the event sleeps instead of spinning. The event records time
// only if it is created with `timing`.
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

// Blocks until the event has happened (clocks::AskBeforeSleeping).
absl::Status WaitFor(const Event& event);

// Work that is enqueued on `stream` from now on waits for the event.
inline absl::Status Await(const Event& event, cudaStream_t stream) {
  return ToStatus(cudaStreamWaitEvent(stream, event.get(), 0), "cudaStreamWaitEvent");
}

// Retained hidden states of the CUDA backend, in device memory. Thread-compatible (RetainedMemory).
class CudaRetained final : public RetainedMemory {
 public:
  // The first `bytes` of `buffer`, which lies on GPU `device`, are used.
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

// One GPU: its streams, memory ledger and GEMMs, the thread that reports finished chunks, and the failure
// after which the GPU can no longer be used.
//
// Streams: `upload` and `download` copy and convert rows, `compute` does everything else, in submission
// order. Their kernels start before waiting kernels of other streams (StreamPriority), except for work that
// is enqueued with InBackground. Threads that wait for the GPU sleep.
//
// Members are thread-safe where their comment says so; only the backend's driving thread uses the others.
class Device {
 public:
  static constexpr int kMaxChunksInFlight = 2;
  static constexpr absl::Duration kDrainLimit = absl::Seconds(10);

  // Fills in the limits of the current device that depend on the kernels of Hopper, so that Device cannot
  // find them by itself: fused_clusters and cluster_order.
  using FindKernelLimits = void (*)(DeviceLimits&);
  // Options and errors as of CreateCudaBackend.
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
  // Calls `enqueue`, which enqueues work on compute() that no result waits for. The work keeps its place in
  // the order of the stream, after earlier work and before later work, but it takes no precedence over other
  // streams. `done` happens when the work has ended.
  absl::Status InBackground(const Event& done, absl::FunctionRef<absl::Status()> enqueue);
  void* gemm_workspace() const { return gemm_workspace_.data(); }

  // Makes this device current for the calling thread. Returns the error that Fail has remembered, if there is
  // one. Thread-safe.
  absl::Status MakeCurrent() const;
  // Remembers `status` if it is UNAVAILABLE: the device cannot be trusted after this error, and MakeCurrent
  // returns the error. Returns `status`. Thread-safe.
  absl::Status Fail(absl::Status status);
  // Waits until all streams are idle.
  absl::Status Synchronize();
  // For use after a failure: waits until all streams have done the work enqueued before, or have failed, so
  // that no copy reads or writes memory of callers any more. Returns `failure`; after kDrainLimit its message
  // says that the GPU has not ended its work. Thread-safe; the calling thread's current device must be this
  // one.
  absl::Status Drain(absl::Status failure) const;

  // What the completion thread calls for one chunk, in this order: `results` waits for the results and
  // reports them, `wait_done` waits for the end of the chunk, and `done` reports the end. in_flight() counts
  // the chunk from Enqueue until wait_done returns.
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
  cudaStream_t background_ = nullptr;  // null: compute_ does its work too
  cudaStream_t current_ = nullptr;     // compute(): compute_ or, within InBackground, background_
  Event fork_;                         // on compute_, where the work of background_ begins
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

// How the parts of a head that is split by vocabulary exchange data while a chunk is computed. Each part is
// on a device of its own. Every part calls the same functions with the same sizes in the same order, from the
// thread that drives its device. Each call enqueues work on the device's compute stream. The completion
// thread calls Wait, and any thread may call Abort.
//
// Errors: UNAVAILABLE. After an error in one part no part can continue: the part that failed has to call
// Abort, so that the others do not wait for it.
class ClassExchange {
 public:
  virtual ~ClassExchange() = default;

  // data [n] becomes the sum over all parts. `kind`: the kind of exchange that the time is counted for.
  virtual absl::Status Sum(ExchangeKind kind, float* data, int64_t n) = 0;
  // all [parts, bytes] receives `own` [bytes] of each part.
  virtual absl::Status Gather(const void* own, void* all, int64_t bytes) = 0;
  // The range of `rows` rows whose sums this part has after SumRows. Each row is in the range of one part.
  virtual RowRange RowsHere(int64_t rows) const = 0;
  // data [rows, cols] becomes the sum over all parts in the rows of RowsHere; other rows are unspecified.
  // `data` needs room for `rows` rounded up to a multiple of the number of parts.
  virtual absl::Status SumRows(float* data, int64_t rows, int64_t cols) = 0;

  // Calls `enqueue`, which enqueues a chunk and its exchanges. `enqueue` can hang if another part does not
  // make the same calls; after a timeout, Watched then ends the exchanges.
  virtual absl::Status Watched(absl::FunctionRef<absl::Status()> enqueue) = 0;
  // Waits until the event has happened, or until it can no longer happen.
  virtual absl::Status Wait(const Event& event) = 0;
  // Ends the exchanges of all parts: from now on none happens.
  virtual void Abort(const absl::Status& reason) = 0;
};

// The exchange of a head that has all classes: there is nothing to exchange.
class SoleExchange final : public ClassExchange {
 public:
  absl::Status Sum(ExchangeKind, float*, int64_t) override { return absl::OkStatus(); }
  absl::Status Gather(const void*, void*, int64_t) override { return absl::OkStatus(); }
  RowRange RowsHere(int64_t rows) const override { return {0, rows}; }
  absl::Status SumRows(float*, int64_t, int64_t) override { return absl::OkStatus(); }
  absl::Status Watched(absl::FunctionRef<absl::Status()> enqueue) override { return enqueue(); }
  absl::Status Wait(const Event& event) override { return WaitFor(event); }
  void Abort(const absl::Status&) override {}
};

// The exchange of a head: a SoleExchange when the head is made. If the head has other parts, the exchange is
// replaced when the parts are connected.
struct ClassLink {
  std::unique_ptr<ClassExchange> exchange = std::make_unique<SoleExchange>();
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_DEVICE_DEVICE_H_
