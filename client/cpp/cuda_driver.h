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
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"

namespace lossd::client::internal {

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

  // The GPU with this UUID ("GPU-..."); nullopt if this process does not see it.
  absl::StatusOr<std::optional<int>> Find(absl::string_view uuid);
  // The GPU whose memory is at this address; an error for memory that the driver does not know.
  absl::StatusOr<int> DeviceOf(const void* address);

  // Maps memory of `device` that another process shares by a POSIX descriptor, which stays the caller's.
  absl::StatusOr<uint8_t*> Import(int descriptor, uint64_t bytes, int device);
  // Undoes Import of so many bytes; ends without effect if the driver is gone already.
  void Unmap(uint8_t* address, uint64_t bytes, int device);

  // Memory of a GPU for this process alone.
  absl::StatusOr<uint8_t*> Allocate(uint64_t bytes, int device);
  void Free(uint8_t* address, int device);

  // Locks memory of the host, which the caller has mapped, so that all GPUs copy to and from it without a
  // detour: whole pages, from the one that begins at `memory` on. To be undone before the memory is unmapped.
  absl::Status Pin(void* memory, uint64_t bytes, int device);
  // Undoes Pin; ends without effect if the driver is gone already.
  void Unpin(void* memory, int device);

  // Copies between any two addresses, with work of `device` alone.
  absl::Status Copy(void* to, const void* from, uint64_t bytes, int device);
  // `to` is memory of a GPU.
  absl::Status FillZeros(void* to, uint64_t bytes, int device);

 private:
  struct Functions;
  struct Lane;  // a stream, and the event that tells the end of its work
  class Current;

  explicit CudaDriver(std::unique_ptr<const Functions> functions);

  absl::Status Check(int result, absl::string_view function) const;
  // The device's primary context, which this object keeps.
  absl::StatusOr<void*> Context(int device) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Map(uint64_t address, uint64_t bytes, uint64_t handle, int device) const;
  // Runs `enqueue` with a stream that nothing else uses, and waits for what it was given.
  absl::Status Run(int device, absl::FunctionRef<absl::Status(void* stream)> enqueue)
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<Lane> TakeLane(int device) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Await(const Lane& lane) const;
  // Of a lane whose work has failed, after that has ended.
  void Destroy(const Lane& lane) const;

  const std::unique_ptr<const Functions> functions_;
  absl::Mutex mu_;
  std::map<int, void*> contexts_ ABSL_GUARDED_BY(mu_);           // by device
  std::map<int, std::vector<Lane>> lanes_ ABSL_GUARDED_BY(mu_);  // those that nothing uses, by device
};

// Copies between two addresses. `gpu`: the one whose memory either of them is, which does the work if they
// are of two; nullopt: both are of the host.
absl::Status CopyBytes(void* to, const void* from, uint64_t bytes, std::optional<int> gpu);
// Fills memory of the GPU, or of the host, with zeros.
absl::Status FillZeros(void* to, uint64_t bytes, std::optional<int> gpu);

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_CUDA_DRIVER_H_
