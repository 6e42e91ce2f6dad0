// SPDX-License-Identifier: Apache-2.0
// Sums and copies among GPUs: the interface (Collectives) and its two implementations. The GPUs are in one
// process, or in several processes with one GPU each. Nccl (nccl.cc; nccl_none.cc in builds without NCCL's
// header) works by NCCL, HostCollectives (host_collectives.cc) through the memory of the hosts where NCCL
// cannot.
//
// Threads: the backends' driving thread calls what all members do, and the thread that drives a device calls
// what its member does alone. Wait for an event, Watched, Abort and failure() are thread-safe.
// Errors: UNAVAILABLE for whatever goes wrong, and if an exchange does not end in time. After that every
// exchange fails with the first reason.
#ifndef LOSSD_KERNELS_CUDA_DEVICE_COLLECTIVES_H_
#define LOSSD_KERNELS_CUDA_DEVICE_COLLECTIVES_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/cuda/device/device_memory.h"
#include "kernels/cuda/device/event_waiter.h"
#include "kernels/head_config.h"
#include "kernels/replica.h"

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

// Collectives by NCCL, which is loaded at run time: among several GPUs of this process, or among several
// processes with one GPU each.
//
// Threads and errors as Collectives; errors name the call of NCCL that failed. After one, the communicators
// have been aborted. The library stays loaded until the process ends.
class Nccl final : public Collectives {
 public:
  static constexpr absl::Duration kTimeout = absl::Minutes(1);

  // Communicators of these GPUs, by their indices; no index may be given twice. Takes a second or so.
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

// Collectives of GPUs in several processes, one in each, through the memory of their hosts: what goes to
// another rank is copied to the host, sent, and copied to that rank's GPU. It needs no NCCL, and several
// ranks may have the same GPU.
//
// An exchange is enqueued in pieces: a copy to pinned memory, a wait of the stream until a thread of the
// object's own has sent and received, and a copy back. That thread waits for the stream to come there, and at
// most as long as the transfers allow for other ranks. An exchange after one that has failed does nothing, so
// that streams always come to their end.
//
// Sums are formed in the order of the ranks: all ranks get the same bits.
class HostCollectives final : public Collectives {
 public:
  // What one rank gets from another at a time.
  static constexpr int64_t kPieceBytes = int64_t{4} << 20;
  // Exchanges that are enqueued; the driving thread waits before there are more.
  static constexpr size_t kMostQueued = 256;

  // Of this process's GPU `device`. `transfers` are connected, and outlive the object.
  // RESOURCE_EXHAUSTED if there is no pinned memory of MemoryBytes(). All exchanges are enqueued on the same
  // stream.
  static absl::StatusOr<std::unique_ptr<HostCollectives>> Create(int device, HostTransfers* transfers);
  // What it takes of the host's memory: a piece of each rank.
  static int64_t MemoryBytes(int ranks) { return ranks * kPieceBytes + kNumberBytes; }
  // No exchange may be under way.
  ~HostCollectives() override;
  HostCollectives(const HostCollectives&) = delete;
  HostCollectives& operator=(const HostCollectives&) = delete;

  int members() const override { return transfers_->replica().count; }
  int first_member() const override { return transfers_->replica().index; }
  absl::Status Sum(const std::vector<Part>& parts, int64_t floats, int root) override;
  absl::Status Spread(const std::vector<Part>& parts, DType dtype, int64_t count, int root) override;
  absl::Status Enqueue(absl::FunctionRef<absl::Status()> exchange) override;
  absl::Status Wait(const std::vector<Part>& parts) override;
  absl::Status SumOfAll(const Part& part, int64_t floats) override;
  absl::Status Gather(const Part& part, const void* own, int64_t bytes) override;
  absl::Status Wait(int local, cudaEvent_t event) override;
  absl::Status Abort(absl::Status reason) override ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status failure() const override ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  static constexpr int64_t kNumberBytes = 128;
  using StreamValueFunction = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned);

  // What the host does for one piece, once this rank's bytes of it are in its room.
  struct Exchange {
    uint32_t number = 0;
    size_t bytes = 0;
    std::vector<int> send_to;       // the own room
    std::vector<int> receive_from;  // each into its room
    bool sums = false;              // adds up the rooms of all ranks, into the own one
  };

  HostCollectives(int device, HostTransfers* transfers) : device_(device), transfers_(transfers) {}
  absl::Status Start();

  bool is(int member) const { return member == first_member(); }
  uint8_t* Room(int member) const { return memory_.data() + member * kPieceBytes; }
  // Numbers of the exchange that the stream has come to, and of the last that is done, for which it waits.
  uint32_t* arrived() const { return reinterpret_cast<uint32_t*>(Room(members())); }
  uint32_t* done() const { return reinterpret_cast<uint32_t*>(Room(members()) + kNumberBytes / 2); }
  std::vector<int> Others() const;
  // Until the queue takes another exchange.
  absl::Status AwaitRoom(cudaStream_t stream) ABSL_LOCKS_EXCLUDED(mutex_);
  // Has the stream wait for an exchange, and the thread do it when the stream is there.
  absl::Status Launch(Exchange exchange, cudaStream_t stream) ABSL_LOCKS_EXCLUDED(mutex_);
  // ---- On the thread ----
  // False if the stream does not come any more.
  bool AwaitArrival(uint32_t number) const ABSL_LOCKS_EXCLUDED(mutex_);
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Do(const Exchange& exchange) ABSL_LOCKS_EXCLUDED(mutex_);
  // Calls `piece` for parts of `bytes` that fit a room.
  static absl::Status ForPieces(int64_t bytes,
                                absl::FunctionRef<absl::Status(int64_t begin, int64_t bytes)> piece);

  const int device_;
  HostTransfers* const transfers_;
  StreamValueFunction await_value_ = nullptr, write_value_ = nullptr;  // of the driver
  MemoryLedger ledger_{0};
  PinnedBuffer memory_;    // [ranks, kPieceBytes], then the numbers
  uint32_t enqueued_ = 0;  // number of the last one; of the driving thread
  mutable absl::Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  std::deque<Exchange> queue_ ABSL_GUARDED_BY(mutex_);  // the first is being done; at most kMostQueued
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_DEVICE_COLLECTIVES_H_
