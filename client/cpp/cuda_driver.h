// SPDX-License-Identifier: Apache-2.0
// What this client takes from CUDA's driver: importing memory of a GPU that a server shares, and copies
// between it, memory of other GPUs and memory of the host. The driver is loaded when it is first needed;
// nothing links it, so that programs start on machines without one.
//
// Devices are the driver's numbers, from 0 on. Work is done in the device's primary context, which is that of
// CUDA's runtime and of the libraries upon it, on streams of the client's that wait for no other stream; the
// calling thread's current context is the same afterwards. A copy is over when its function returns, also
// with an error; a thread that waits for one takes no CPU time. Errors are UNAVAILABLE and name the driver's
// function.
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

// What a stream of the caller's had been given at one moment. Thread-safe.
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

class CudaDriver {
 public:
  // The driver of this machine, which lives as long as the process. UNAVAILABLE, saying why, if there is none
  // or it finds no GPU; then a later call tries again.
  static absl::StatusOr<CudaDriver*> Get();
  // The same from a library of another name than the driver's, for tests.
  static absl::StatusOr<std::unique_ptr<CudaDriver>> Load(const std::string& library);
  CudaDriver(const CudaDriver&) = delete;
  CudaDriver& operator=(const CudaDriver&) = delete;
  ~CudaDriver();

  // How many GPUs this process sees.
  absl::StatusOr<int> Count() const;
  // The GPU with this UUID ("GPU-..."); nullopt if this process does not see it.
  absl::StatusOr<std::optional<int>> Find(absl::string_view uuid) const;
  absl::StatusOr<std::string> UuidOf(int device) const;
  // The GPU whose context is the calling thread's; nullopt: it has none.
  std::optional<int> Current() const;
  // How far the memory of the second GPU is for the first one: 0 if they are the same, and the less the
  // faster what connects them; nullopt: nothing does.
  std::optional<int> Distance(int from, int to) const;
  // The GPU whose memory is at this address; an error for memory that the driver does not know.
  absl::StatusOr<int> DeviceOf(const void* address);

  // Maps memory of `device` that another process shares by a POSIX descriptor, which stays the caller's.
  absl::StatusOr<uint8_t*> Import(int descriptor, uint64_t bytes, int device);
  // Lets GPU `other` and `owner`, whose memory was imported to this address, reach each other's memory, so
  // that either copies what it has to the other one's without a detour through memory of the host. False if
  // nothing connects the two. Once for the same memory; a repeat only tells the answer.
  bool LetReach(uint8_t* address, uint64_t bytes, int owner, int other) ABSL_LOCKS_EXCLUDED(mu_);
  // Undoes Import of so many bytes; ends without effect if the driver is gone already.
  void Unmap(uint8_t* address, uint64_t bytes, int device) ABSL_LOCKS_EXCLUDED(mu_);

  // Memory of a GPU for this process alone.
  absl::StatusOr<uint8_t*> Allocate(uint64_t bytes, int device);
  void Free(uint8_t* address, int device);

  // Locks memory of the host, which the caller has mapped, so that all GPUs copy to and from it without a
  // detour: whole pages, from the one that begins at `memory` on. To be undone before the memory is unmapped.
  absl::Status Pin(void* memory, uint64_t bytes, int device);
  // Undoes Pin; ends without effect if the driver is gone already.
  void Unpin(void* memory, int device);

  // Copies between any two addresses, with work of `device` alone. Memory that was imported is one of them
  // only if it is the device's, or if LetReach was true. Begins after `after` has been reached, unless that
  // is null; so does FillZeros.
  absl::Status Copy(void* to, const void* from, uint64_t bytes, int device,
                    const StreamPoint* after = nullptr);
  // `to` is memory of a GPU.
  absl::Status FillZeros(void* to, uint64_t bytes, int device, const StreamPoint* after = nullptr);

  // All that a stream of the device has been given so far. The driver outlives it.
  absl::StatusOr<std::shared_ptr<const StreamPoint>> PointOf(void* stream, int device);
  // Waits until that is done.
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
  // Runs `enqueue` with a stream that nothing else uses, after `after`, and waits for what it was given.
  absl::Status Run(int device, const StreamPoint* after,
                   absl::FunctionRef<absl::Status(void* stream)> enqueue) ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<Lane> TakeLane(int device) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Await(const Lane& lane) const;
  // Of a lane whose work has failed, after that has ended.
  void Destroy(const Lane& lane) const;

  const std::unique_ptr<const Functions> functions_;
  absl::Mutex mu_;
  std::map<int, void*> contexts_ ABSL_GUARDED_BY(mu_);           // by device
  std::map<int, std::vector<Lane>> lanes_ ABSL_GUARDED_BY(mu_);  // those that nothing uses, by device
  // What LetReach has found, by address of the imported memory and other GPU.
  std::map<std::pair<uint64_t, int>, bool> reached_ ABSL_GUARDED_BY(mu_);
};

// As CudaDriver::LetReach.
bool LetReach(uint8_t* address, uint64_t bytes, int owner, int other);

// Copies between two addresses. `gpu`: the one that does the work; nullopt: both are of the host.
// `after` as in CudaDriver::Copy, if a GPU does it.
absl::Status CopyBytes(void* to, const void* from, uint64_t bytes, std::optional<int> gpu,
                       const StreamPoint* after = nullptr);
// Fills memory of the GPU, or of the host, with zeros, in the same way.
absl::Status FillZeros(void* to, uint64_t bytes, std::optional<int> gpu, const StreamPoint* after = nullptr);

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_CUDA_DRIVER_H_
