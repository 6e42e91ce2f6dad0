// SPDX-License-Identifier: Apache-2.0
// Collectives by NCCL, which is loaded at run time: among several GPUs of this process, or among several
// processes with one GPU each.
//
// Threads and errors as Collectives; errors name the call of NCCL that failed. After one, the communicators
// have been aborted. The library stays loaded until the process ends.
#ifndef LOSSD_KERNELS_CUDA_DEVICE_NCCL_H_
#define LOSSD_KERNELS_CUDA_DEVICE_NCCL_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/cuda/device/collectives.h"
#include "kernels/cuda/device/event_waiter.h"
#include "kernels/head_config.h"
#include "kernels/replica.h"

namespace lossd::kernels::cuda {

class Nccl final : public Collectives {
 public:
  static constexpr absl::Duration kTimeout = absl::Minutes(1);

  // Communicators of these GPUs, by their indices, each of which may stand there once. Takes a second or so.
  // UNAVAILABLE also if NCCL cannot be loaded. `timeout`: how long an exchange may take before it counts as
  // hung.
  static absl::StatusOr<std::unique_ptr<Nccl>> Connect(std::vector<int> devices,
                                                       absl::Duration timeout = kTimeout);
  // What the processes have to have in common to join; made by one of them.
  static absl::StatusOr<std::string> NewId();
  // Whether NCCL can be loaded. UNAVAILABLE with the reason.
  static absl::Status CheckLoads();
  // Of the library that is loaded, "2.28.3". UNAVAILABLE as CheckLoads.
  static absl::StatusOr<std::string> Version();
  // The communicator of GPU `device`, the only one of this process, as one of `replica.count` processes that
  // join at the same time, with all its links. Takes 64 MiB of the GPU meanwhile. UNAVAILABLE if they do not
  // come within `timeout`; a thread may then hang.
  static absl::StatusOr<std::unique_ptr<Nccl>> Join(int device, Replica replica, const std::string& id,
                                                    absl::Duration timeout);
  ~Nccl() override;
  Nccl(const Nccl&) = delete;
  Nccl& operator=(const Nccl&) = delete;

  int members() const override { return replica_.count; }
  int first_member() const override { return replica_.index; }
  absl::Status Sum(const std::vector<Part>& parts, int64_t floats, int root) override;
  absl::Status Spread(const std::vector<Part>& parts, DType dtype, int64_t count, int root) override;
  absl::Status SumShards(const std::vector<Part>& parts, int64_t floats) override;
  absl::Status SpreadShards(const std::vector<Part>& parts, DType dtype, int64_t count) override;
  absl::Status Enqueue(absl::FunctionRef<absl::Status()> exchange) override;
  absl::Status Wait(const std::vector<Part>& parts) override { return Wait(parts, timeout_); }
  absl::Status SumOfAll(const Part& part, int64_t floats) override;
  absl::Status Gather(const Part& part, const void* own, int64_t bytes) override;
  absl::Status Watched(absl::FunctionRef<absl::Status()> enqueue) override;
  absl::Status Wait(int local, cudaEvent_t event) override { return Wait(local, event, timeout_); }
  // All communicators at once, and only once: they are NCCL's no more when it returns. Waits until no thread
  // is inside a call of NCCL, which would go on in memory that is freed, and so cannot free a thread that
  // hangs there: MakeLinks makes beforehand what such a call has been seen to wait for. The current device
  // stays.
  absl::Status Abort(absl::Status reason) override ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status failure() const override ABSL_LOCKS_EXCLUDED(mutex_);

  // What one member does: data [members, floats]: the member's place becomes the sum over all members.
  absl::Status SumPlaces(const Part& part, int64_t floats);
  // Every kind of exchange, of several sizes, for all GPUs of this process at once, so that NCCL makes the
  // links that they take: with the first exchange of a kind a thread waits for the others inside NCCL, where
  // no timeout ends it. Takes 64 MiB of each GPU meanwhile. Called once, before other exchanges; all
  // processes at the same time (Join does it by itself).
  absl::Status MakeLinks();
  // As Wait, at most `timeout`.
  absl::Status Wait(const std::vector<Part>& parts, absl::Duration timeout);
  absl::Status Wait(int local, cudaEvent_t event, absl::Duration timeout);

 private:
  struct Library;
  struct Joining;
  // `replica`: of the first of the devices; the others follow.
  Nccl(std::vector<int> devices, Replica replica, absl::Duration timeout);
  // The first step of Join.
  absl::Status Enter(const std::string& id);
  // `data` of the parts has room for `floats` of each member.
  absl::Status MakeLinks(const std::vector<Part>& parts, int64_t floats);
  // The communicators' own report, which comes without a call.
  absl::Status AsynchronousError() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Calls `fn` while nothing ends the communicators; the failure if they have ended.
  absl::Status WhileAlive(absl::FunctionRef<absl::Status()> fn) ABSL_LOCKS_EXCLUDED(mutex_);

  const std::vector<int> devices_;
  const Replica replica_;
  const absl::Duration timeout_;
  std::unique_ptr<Library> library_;
  std::vector<std::unique_ptr<EventWaiter>> waiters_;  // of the GPUs of this process
  // Held by readers while they use the communicators.
  mutable absl::Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  std::optional<EnqueueWatch> watch_;  // of an object with GPUs; ends before what it aborts
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_DEVICE_NCCL_H_
