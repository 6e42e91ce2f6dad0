// Sums and copies among several GPUs, of this process or one of each of several, by NCCL, which is loaded at
// run time.
//
// Threads: driven by one thread, the backends' driving thread, but for what one member does, which is for the
// thread that drives its device, and Wait for an event, Abort and failure(), which are thread-safe.
// Errors: UNAVAILABLE, with the name of the call, for whatever NCCL reports, and where an exchange does not
// end in time. After that every exchange fails: the communicators have been aborted.
#ifndef LOSSD_KERNELS_CUDA_DEVICE_NCCL_H_
#define LOSSD_KERNELS_CUDA_DEVICE_NCCL_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/dtype.h"
#include "kernels/replica.h"

namespace lossd::kernels::cuda {

class Nccl {
 public:
  static constexpr absl::Duration kTimeout = absl::Minutes(1);

  // Communicators of these GPUs, by their indices, each of which may stand there once. Takes a second or so.
  // UNAVAILABLE also if NCCL cannot be loaded. `timeout`: how long an exchange may take before it counts as
  // hung.
  static absl::StatusOr<std::unique_ptr<Nccl>> Connect(std::vector<int> devices,
                                                       absl::Duration timeout = kTimeout);
  // What the processes have to have in common to join; made by one of them.
  static absl::StatusOr<std::string> NewId();
  // The communicator of GPU `device`, the only one of this process, as one of `replica.count` processes that
  // join at the same time. UNAVAILABLE if they do not come within `timeout`; a thread may then hang.
  static absl::StatusOr<std::unique_ptr<Nccl>> Join(int device, Replica replica, const std::string& id,
                                                    absl::Duration timeout);
  ~Nccl();
  Nccl(const Nccl&) = delete;
  Nccl& operator=(const Nccl&) = delete;

  // The part in an exchange of one GPU of this process: `data` is memory of device `local` (a place in
  // `devices`), where `stream` belongs too.
  struct Part {
    int local = 0;
    void* data = nullptr;
    cudaStream_t stream = nullptr;
  };

  // ---- Within Enqueue; on the streams of the parts, of which each GPU of this process has one ----
  // The sum over all parts, in place, at the part of member `root`; what the others hold stays.
  absl::Status Sum(const std::vector<Part>& parts, int64_t floats, int root);
  // A copy of what member `root` holds, to all others.
  absl::Status Spread(const std::vector<Part>& parts, DType dtype, int64_t count, int root);

  // ---- What one member does, on its stream; every member does the same in the same order. ----
  // data [floats] becomes the sum over all members.
  absl::Status SumOfAll(const Part& part, int64_t floats);
  // data [members, bytes]: what every member has at `own`.
  absl::Status Gather(const Part& part, const void* own, int64_t bytes);
  // data [members, floats]: the member's place becomes the sum over all members.
  absl::Status SumPlaces(const Part& part, int64_t floats);
  // All of these for all members at once, so that NCCL makes the links that they take: with the first
  // exchange of a kind a thread waits for the others. `data` of the parts has room for `floats` of each
  // member.
  absl::Status MakeLinks(const std::vector<Part>& parts, int64_t floats);
  // Waits until the event has happened, at most `timeout`, and says whether all exchanges before it did.
  absl::Status Wait(int member, cudaEvent_t event, absl::Duration timeout);
  absl::Status Wait(int member, cudaEvent_t event) { return Wait(member, event, timeout_); }
  // Ends all communicators; `reason` is what every later exchange says. Returns it.
  absl::Status Abort(absl::Status reason) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status failure() const ABSL_LOCKS_EXCLUDED(mutex_);

  // Enqueues what `exchange` asks for as one operation.
  absl::Status Enqueue(absl::FunctionRef<absl::Status()> exchange);
  // Waits until the streams have done what was enqueued, at most `timeout`.
  absl::Status Wait(const std::vector<Part>& parts, absl::Duration timeout);
  absl::Status Wait(const std::vector<Part>& parts) { return Wait(parts, timeout_); }

  // All GPUs, and the first of this process among them.
  int members() const { return replica_.count; }
  int first_member() const { return replica_.index; }

 private:
  struct Library;
  // `replica`: of the first of the devices; the others follow.
  Nccl(std::vector<int> devices, Replica replica, absl::Duration timeout);
  absl::Status Check(int result, const char* call) const;
  absl::Status CallSumOfAll(const Part& part, int64_t floats) const;
  absl::Status CallGather(const Part& part, const void* own, int64_t bytes) const;
  absl::Status CallSumPlaces(const Part& part, int64_t floats) const;
  // The communicators' own report, which comes without a call.
  absl::Status AsynchronousError() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Calls `fn` while nothing ends the communicators; the failure if they have ended.
  absl::Status WhileAlive(absl::FunctionRef<absl::Status()> fn) ABSL_LOCKS_EXCLUDED(mutex_);

  const std::vector<int> devices_;
  const Replica replica_;
  const absl::Duration timeout_;
  std::unique_ptr<Library> library_;
  // Held by readers while they use the communicators.
  mutable absl::Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_DEVICE_NCCL_H_
