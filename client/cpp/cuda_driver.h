// SPDX-License-Identifier: Apache-2.0
// CudaDriver: the functions of CUDA's driver that the client uses. They import GPU memory that a server
// shares, and copy between this memory, memory of other GPUs and host memory. The driver's library is loaded
// when it is first needed; the client is not linked with it, so programs also start on machines without a
// driver.
//
// A `device` is the driver's number of a GPU, from 0 on. Work runs in the device's primary context, which
// CUDA's runtime and the libraries on top of it use too. It runs on streams of the client's own, which do not
// wait for other streams. Functions leave the calling thread's current context as it was. A copy has ended
// when its function returns, also with an error; a thread that waits for a copy uses no CPU time. Errors are
// UNAVAILABLE and name the driver's function.
//
// Thread-safe.
#ifndef LOSSD_CLIENT_CPP_CUDA_DRIVER_H_
#define LOSSD_CLIENT_CPP_CUDA_DRIVER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"

namespace lossd::client::internal {

class CudaDriver;

// A point on one of the caller's CUDA streams: all work that had been put on the stream when PointOf made the
// point. Thread-safe.
class StreamPoint {
 public:
  StreamPoint(CudaDriver* driver, void* event, int device)
      : driver_(driver), event_(event), device_(device) {}
  ~StreamPoint();
  StreamPoint(const StreamPoint&) = delete;
  StreamPoint& operator=(const StreamPoint&) = delete;

  void* event() const { return event_; }
  int device() const { return device_; }

 private:
  CudaDriver* const driver_;
  void* const event_;
  const int device_;
};

// CUDA's driver. The comment at the top of this file has its contract.
class CudaDriver {
 public:
  // The driver of this machine; the object lives as long as the process. UNAVAILABLE, with the reason, if
  // there is no driver or it finds no GPU. After such an error a later call tries again.
  static absl::StatusOr<CudaDriver*> Get();
  // Loads the driver from a library with this name; for tests.
  static absl::StatusOr<std::unique_ptr<CudaDriver>> Load(const std::string& library);
  CudaDriver(const CudaDriver&) = delete;
  CudaDriver& operator=(const CudaDriver&) = delete;
  ~CudaDriver();

  // How many GPUs this process sees.
  absl::StatusOr<int> Count() const;
  // The GPU with this UUID ("GPU-..."); nullopt if this process does not see it.
  absl::StatusOr<std::optional<int>> Find(absl::string_view uuid) const;
  absl::StatusOr<std::string> UuidOf(int device) const;
  // The GPU of the calling thread's current context; nullopt: the thread has no context.
  std::optional<int> Current() const;
  // How far the memory of GPU `to` is from GPU `from`. 0 if they are the same; otherwise the faster their
  // connection, the smaller the number. Nullopt if they have no connection.
  std::optional<int> Distance(int from, int to) const;
  // The GPU that has the memory at this address. An error if the driver does not know the address.
  absl::StatusOr<int> DeviceOf(const void* address);

  // Maps memory of `device` that another process shares by a POSIX file descriptor. The descriptor still
  // belongs to the caller.
  absl::StatusOr<uint8_t*> Import(int descriptor, uint64_t bytes, int device);
  // Lets two GPUs access each other's memory: `owner`, whose memory was imported to `address`, and `other`.
  // Then each of them can copy from its memory to the other's without a detour through host memory. False if
  // the two have no connection. For the same memory the work is done once; further calls only return the
  // result.
  bool LetReach(uint8_t* address, uint64_t bytes, int owner, int other) ABSL_LOCKS_EXCLUDED(mu_);
  // Undoes Import of `bytes` at `address`. Has no effect if the driver has shut down already.
  void Unmap(uint8_t* address, uint64_t bytes, int device) ABSL_LOCKS_EXCLUDED(mu_);

  // Allocates and frees GPU memory for this process alone.
  absl::StatusOr<uint8_t*> Allocate(uint64_t bytes, int device);
  void Free(uint8_t* address, int device);

  // Locks host memory that the caller has mapped, so that all GPUs copy to and from it directly. Locks whole
  // pages; `memory` is the begin of a page. Call Unpin before the memory is unmapped.
  absl::Status Pin(void* memory, uint64_t bytes, int device);
  // Undoes Pin. Has no effect if the driver has shut down already.
  void Unpin(void* memory, int device);

  // Copies between any two addresses; only `device` does the work. If one of the addresses is imported
  // memory, this must be memory of `device`, or LetReach must have returned true. If `after` is not null, the
  // copy begins when the work before this point is done.
  absl::Status Copy(void* to, const void* from, uint64_t bytes, int device,
                    const StreamPoint* after = nullptr);
  // Fills GPU memory with zeros. `after` is as in Copy.
  absl::Status FillZeros(void* to, uint64_t bytes, int device, const StreamPoint* after = nullptr);

  // The point after all work that has been put on this stream of the device so far. The driver must outlive
  // the point.
  absl::StatusOr<std::shared_ptr<const StreamPoint>> PointOf(void* stream, int device);
  // Waits until the work before the point is done.
  absl::Status Await(const StreamPoint& point);

 private:
  friend class StreamPoint;
  struct Functions;
  struct Lane;  // a stream, and the event that tells the end of its work
  class Entered;

  explicit CudaDriver(std::unique_ptr<const Functions> functions);

  absl::Status Check(int result, absl::string_view function) const;
  // The device's primary context, which this object keeps.
  absl::StatusOr<void*> Context(int device) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Map(uint64_t address, uint64_t bytes, uint64_t handle, int device) const;
  absl::Status GiveAccess(uint64_t address, uint64_t bytes, int device) const;
  absl::Status Connect(uint64_t address, uint64_t bytes, int owner, int other) ABSL_LOCKS_EXCLUDED(mu_);
  // Calls `enqueue` with a stream that nothing else uses, and waits until the work that it has put on the
  // stream is done. The work begins after the point `after`, unless that is null.
  absl::Status Run(int device, const StreamPoint* after,
                   absl::FunctionRef<absl::Status(void* stream)> enqueue) ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<Lane> TakeLane(int device) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Await(const Lane& lane) const;
  // Destroys a lane whose work has failed, after its work has ended.
  void Destroy(const Lane& lane) const;

  const std::unique_ptr<const Functions> functions_;
  absl::Mutex mu_;
  std::map<int, void*> contexts_ ABSL_GUARDED_BY(mu_);           // by device
  std::map<int, std::vector<Lane>> lanes_ ABSL_GUARDED_BY(mu_);  // unused lanes, by device
  // The results of LetReach, by the address of the imported memory and `other`.
  std::map<std::pair<uint64_t, int>, bool> reached_ ABSL_GUARDED_BY(mu_);
};

// As CudaDriver::LetReach; false if there is no driver.
bool LetReach(uint8_t* address, uint64_t bytes, int owner, int other);

// Copies between two addresses. `gpu` does the work; nullopt: both addresses are host memory, and the CPU
// copies. With a GPU, `after` is as in CudaDriver::Copy.
absl::Status CopyBytes(void* to, const void* from, uint64_t bytes, std::optional<int> gpu,
                       const StreamPoint* after = nullptr);
// Fills memory of `gpu`, or host memory if it is nullopt, with zeros. `after` is as in CopyBytes.
absl::Status FillZeros(void* to, uint64_t bytes, std::optional<int> gpu, const StreamPoint* after = nullptr);

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_CUDA_DRIVER_H_
