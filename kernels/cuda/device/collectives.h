// SPDX-License-Identifier: Apache-2.0
// The interface of sums and copies among GPUs. The GPUs are in one process, or in several processes with one
// GPU each. Nccl (nccl.h) implements it by NCCL, HostCollectives (host_collectives.h) through the memory of
// the hosts where NCCL cannot.
//
// Threads: the backends' driving thread calls what all members do, and the thread that drives a device calls
// what its member does alone. Wait for an event, Watched, Abort and failure() are thread-safe.
// Errors: UNAVAILABLE for whatever goes wrong, and if an exchange does not end in time. After that every
// exchange fails with the first reason.
#ifndef LOSSD_KERNELS_CUDA_DEVICE_COLLECTIVES_H_
#define LOSSD_KERNELS_CUDA_DEVICE_COLLECTIVES_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

class Collectives {
 public:
  virtual ~Collectives() = default;

  // The part in an exchange of one GPU of this process: `data` is memory of device `local` (counted among
  // those of this process), where `stream` belongs too.
  struct Part {
    int local = 0;
    void* data = nullptr;
    cudaStream_t stream = nullptr;
  };

  // All GPUs, and the first of this process among them.
  virtual int members() const = 0;
  virtual int first_member() const = 0;

  // ---- Within Enqueue; on the streams of the parts, of which each GPU of this process has one ----
  // The sum over all parts, in place, at the part of member `root`; what the others hold stays.
  virtual absl::Status Sum(const std::vector<Part>& parts, int64_t floats, int root) = 0;
  // A copy of what member `root` holds, to all others.
  virtual absl::Status Spread(const std::vector<Part>& parts, DType dtype, int64_t count, int root) = 0;
  // `data` [members, floats] of every part: place i becomes the sum over all parts at member i; what the
  // others hold there stays. As a Sum for each member, in one operation where that is possible.
  virtual absl::Status SumShards(const std::vector<Part>& parts, int64_t floats);
  // `data` [members, count]: a copy of what member i holds in place i, to all others; likewise.
  virtual absl::Status SpreadShards(const std::vector<Part>& parts, DType dtype, int64_t count);
  // Enqueues what `exchange` asks for as one operation.
  virtual absl::Status Enqueue(absl::FunctionRef<absl::Status()> exchange) = 0;
  // Waits until the streams have done what was enqueued.
  virtual absl::Status Wait(const std::vector<Part>& parts) = 0;

  // ---- What one member does, on its stream; every member does the same in the same order. ----
  // data [floats] becomes the sum over all members.
  virtual absl::Status SumOfAll(const Part& part, int64_t floats) = 0;
  // data [members, bytes]: what every member has at `own`.
  virtual absl::Status Gather(const Part& part, const void* own, int64_t bytes) = 0;
  // Waits until the event has happened, and says whether all exchanges before it did. `local`: as in Part.
  virtual absl::Status Wait(int local, cudaEvent_t event) = 0;

  // Calls `enqueue`, which enqueues work of one member, exchanges among it. Where that can hang because
  // another member stays away, the exchanges are ended after the time that one may take.
  virtual absl::Status Watched(absl::FunctionRef<absl::Status()> enqueue) { return enqueue(); }

  // Ends all exchanges; `reason` is what every later one says. Returns the first reason.
  virtual absl::Status Abort(absl::Status reason) = 0;
  virtual absl::Status failure() const = 0;

 protected:
  // Place `place` of every part, `bytes` each.
  static std::vector<Part> PlaceOf(std::vector<Part> parts, int place, int64_t bytes) {
    for (Part& part : parts) part.data = static_cast<uint8_t*>(part.data) + place * bytes;
    return parts;
  }
};

inline absl::Status Collectives::SumShards(const std::vector<Part>& parts, int64_t floats) {
  const auto bytes = floats * static_cast<int64_t>(sizeof(float));
  for (int i = 0; i < members(); ++i) {
    if (absl::Status status = Sum(PlaceOf(parts, i, bytes), floats, i); !status.ok()) return status;
  }
  return absl::OkStatus();
}

inline absl::Status Collectives::SpreadShards(const std::vector<Part>& parts, DType dtype, int64_t count) {
  const auto bytes = count * static_cast<int64_t>(SizeOf(dtype));
  for (int i = 0; i < members(); ++i) {
    if (absl::Status status = Spread(PlaceOf(parts, i, bytes), dtype, count, i); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_DEVICE_COLLECTIVES_H_
