// SPDX-License-Identifier: Apache-2.0
// Sums and copies among GPUs: the interface (Collectives) and its two implementations. The GPUs are in one
// process, or in several processes with one GPU each. Nccl uses NCCL (nccl.cc; nccl_none.cc in builds without
// NCCL's header). HostCollectives copies through the memory of the hosts, where NCCL cannot be used
// (host_collectives.cc).
//
// A member is a GPU that takes part; members are numbered from 0.
//
// Threads: the backends' driving thread calls the functions that act for all members. The thread that drives
// a device calls those of a single member. Wait for an event, Watched, Abort and failure() are thread-safe.
// Errors: UNAVAILABLE for any failure, also if an exchange does not end in time. After a failure every
// exchange returns the first reason.
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

// Exchanges among all members. The head of this file says which thread calls what, and what errors mean.
class Collectives {
 public:
  virtual ~Collectives() = default;

  // One GPU of this process in an exchange: `local` is its index among the GPUs of this process, and `data`
  // and `stream` belong to it.
  struct Part {
    int local = 0;
    void* data = nullptr;
    cudaStream_t stream = nullptr;
  };

  // The number of GPUs in all processes, and the member number of the first GPU of this process.
  virtual int members() const = 0;
  virtual int first_member() const = 0;

  // ---- To be called within Enqueue. `parts` has one part for each GPU of this process. ----
  // data [floats] at member `root` becomes the sum over all members. The other members' data stays.
  virtual absl::Status Sum(const std::vector<Part>& parts, int64_t floats, int root) = 0;
  // data [count] of member `root` is copied to all others.
  virtual absl::Status Spread(const std::vector<Part>& parts, DType dtype, int64_t count, int root) = 0;
  // data [members, floats] of every part: at member i, place i becomes the sum over all members. Other places
  // stay. The effect is that of a Sum for each member, in one operation where that is possible.
  virtual absl::Status SumShards(const std::vector<Part>& parts, int64_t floats);
  // data [members, count] of every part: place i of member i is copied to all others, in one operation where
  // that is possible.
  virtual absl::Status SpreadShards(const std::vector<Part>& parts, DType dtype, int64_t count);
  // Enqueues as one operation the exchanges that `exchange` calls.
  virtual absl::Status Enqueue(absl::FunctionRef<absl::Status()> exchange) = 0;
  // Waits until the streams have done the work that was enqueued.
  virtual absl::Status Wait(const std::vector<Part>& parts) = 0;

  // ---- For one member, on its stream. Every member calls the same functions in the same order. ----
  // data [floats] becomes the sum over all members.
  virtual absl::Status SumOfAll(const Part& part, int64_t floats) = 0;
  // data [members, bytes] receives `own` [bytes] of every member.
  virtual absl::Status Gather(const Part& part, const void* own, int64_t bytes) = 0;
  // Waits until the event has happened, and returns OK if all exchanges before it succeeded. `local`: as in
  // Part.
  virtual absl::Status Wait(int local, cudaEvent_t event) = 0;

  // Calls `enqueue`, which enqueues work of one member, exchanges among it. The call can hang if another
  // member takes no part in an exchange; an implementation where it can ends the exchanges after the timeout.
  virtual absl::Status Watched(absl::FunctionRef<absl::Status()> enqueue) { return enqueue(); }

  // Ends all exchanges; later ones return `reason`. Returns the first reason.
  virtual absl::Status Abort(absl::Status reason) = 0;
  virtual absl::Status failure() const = 0;

 protected:
  // The parts with `data` moved to place `place`; a place has `bytes`.
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

// Collectives by NCCL, which is loaded at run time. Its members are several GPUs of this process, or one GPU
// in each of several processes.
//
// Threads and errors as Collectives. A message names the call of NCCL that failed. After an error the
// communicators have been aborted. The library stays loaded until the process ends.
class Nccl final : public Collectives {
 public:
  static constexpr absl::Duration kTimeout = absl::Minutes(1);

  // Connects these GPUs of this process, given by their indices, each once. Takes a second or so. `timeout`:
  // how long an exchange may take before it counts as hung. UNAVAILABLE also if NCCL cannot be loaded.
  static absl::StatusOr<std::unique_ptr<Nccl>> Connect(std::vector<int> devices,
                                                       absl::Duration timeout = kTimeout);
  // Makes the id that all processes pass to Join; one of them makes it.
  static absl::StatusOr<std::string> NewId();
  // Whether NCCL can be loaded. UNAVAILABLE with the reason.
  static absl::Status CheckLoads();
  // The version of the library that is loaded, e.g. "2.28.3". UNAVAILABLE as CheckLoads.
  static absl::StatusOr<std::string> Version();
  // Connects GPU `device`, the only one of this process, as one of `replica.count` processes that join at the
  // same time, and makes all links (MakeLinks). Meanwhile takes 64 MiB of the GPU. UNAVAILABLE if the
  // processes do not join within `timeout`; a thread may then hang.
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
  // Aborts all communicators at once, and only once; they are gone when it returns. It first waits until no
  // thread is inside a call of NCCL, because such a call would go on in memory that is freed. So it cannot
  // free a thread that hangs inside NCCL; MakeLinks makes in advance the links that such calls have been seen
  // to wait for. The current device stays.
  absl::Status Abort(absl::Status reason) override ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status failure() const override ABSL_LOCKS_EXCLUDED(mutex_);

  // For one member: place `first_member() + part.local` of data [members, floats] becomes the sum over all
  // members.
  absl::Status SumPlaces(const Part& part, int64_t floats);
  // Runs every kind of exchange, with several sizes, for all GPUs of this process at once, so that NCCL makes
  // the links that they need. With the first exchange of a kind a thread waits inside NCCL for the other
  // members, where no timeout ends the wait. Meanwhile takes 64 MiB of each GPU. Called once, before other
  // exchanges, and by all processes at the same time (Join calls it).
  absl::Status MakeLinks();
  // As Wait of Collectives, for at most `timeout`.
  absl::Status Wait(const std::vector<Part>& parts, absl::Duration timeout);
  absl::Status Wait(int local, cudaEvent_t event, absl::Duration timeout);

 private:
  struct Library;
  struct Joining;
  // `replica`: the first of the devices; the others follow it in order.
  Nccl(std::vector<int> devices, Replica replica, absl::Duration timeout);
  // The first step of Join.
  absl::Status MakeCommunicator(const std::string& id);
  // `data` of each part has room for [members, floats].
  absl::Status MakeLinks(const std::vector<Part>& parts, int64_t floats);
  // An error that the communicators report by themselves, or the failure.
  absl::Status AsynchronousError() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Calls `fn` while no thread can end the communicators; returns the failure if they have ended.
  absl::Status WhileAlive(absl::FunctionRef<absl::Status()> fn) ABSL_LOCKS_EXCLUDED(mutex_);

  const std::vector<int> devices_;
  const Replica replica_;
  const absl::Duration timeout_;
  std::unique_ptr<Library> library_;
  std::vector<std::unique_ptr<EventWaiter>> waiters_;  // of the GPUs of this process
  // Held as reader while communicators are used, and as writer while they end.
  mutable absl::Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  std::optional<EnqueueWatch> watch_;  // if there are GPUs; destroyed before what it aborts
};

// Collectives of GPUs in several processes, one GPU in each, through the memory of their hosts: data for
// another rank is copied to the host, sent, and copied to that rank's GPU. This needs no NCCL, and several
// ranks may have the same GPU.
//
// An exchange is enqueued in pieces. For each piece the stream copies to pinned memory, waits until the
// object's own thread has sent and received, and copies back. That thread waits for the stream to reach the
// piece, and waits for other ranks at most as long as the transfers allow. An exchange after a failed one
// does nothing, so streams always come to their end.
//
// Sums are computed in the order of the ranks: all ranks get the same bits.
class HostCollectives final : public Collectives {
 public:
  // The most bytes that one rank receives from another at a time.
  static constexpr int64_t kPieceBytes = int64_t{4} << 20;
  // The most exchanges in the queue; the driving thread waits before it enqueues more.
  static constexpr size_t kMostQueued = 256;

  // `device`: the GPU of this process. `transfers` are connected, and outlive the object. All exchanges must
  // be enqueued on the same stream. RESOURCE_EXHAUSTED if MemoryBytes() of pinned memory cannot be had.
  static absl::StatusOr<std::unique_ptr<HostCollectives>> Create(int device, HostTransfers* transfers);
  // The host memory that the object takes: room for one piece of each rank, and the two counters.
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

  // The work of the host for one piece, once the stream has copied this rank's bytes into its room.
  struct Exchange {
    uint32_t number = 0;
    size_t bytes = 0;
    std::vector<int> send_to;       // ranks that get this rank's room
    std::vector<int> receive_from;  // ranks whose bytes come into their rooms
    bool sums = false;              // add up the rooms of all ranks, into this rank's
  };

  HostCollectives(int device, HostTransfers* transfers) : device_(device), transfers_(transfers) {}
  absl::Status Start();

  bool is(int member) const { return member == first_member(); }
  uint8_t* Room(int member) const { return memory_.data() + member * kPieceBytes; }
  // Counters in pinned memory: the number of the last exchange that the stream has reached, and of the last
  // one that is done. The stream waits for the second.
  uint32_t* arrived() const { return reinterpret_cast<uint32_t*>(Room(members())); }
  uint32_t* done() const { return reinterpret_cast<uint32_t*>(Room(members()) + kNumberBytes / 2); }
  std::vector<int> Others() const;
  // Waits until the queue has room for another exchange.
  absl::Status AwaitRoom(cudaStream_t stream) ABSL_LOCKS_EXCLUDED(mutex_);
  // Queues an exchange, and makes the stream signal its arrival and wait until the thread has done the
  // exchange.
  absl::Status Launch(Exchange exchange, cudaStream_t stream) ABSL_LOCKS_EXCLUDED(mutex_);
  // ---- On the thread ----
  // False if the stream will not reach the exchange any more.
  bool AwaitArrival(uint32_t number) const ABSL_LOCKS_EXCLUDED(mutex_);
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Do(const Exchange& exchange) ABSL_LOCKS_EXCLUDED(mutex_);
  // Calls `piece` for consecutive pieces of `bytes` that fit into a room.
  static absl::Status ForPieces(int64_t bytes,
                                absl::FunctionRef<absl::Status(int64_t begin, int64_t bytes)> piece);

  const int device_;
  HostTransfers* const transfers_;
  StreamValueFunction await_value_ = nullptr, write_value_ = nullptr;  // functions of the driver
  MemoryLedger ledger_{0};
  PinnedBuffer memory_;    // [ranks, kPieceBytes], then the two counters
  uint32_t enqueued_ = 0;  // number of the last exchange; used by the driving thread
  mutable absl::Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  std::deque<Exchange> queue_ ABSL_GUARDED_BY(mutex_);  // the first is being done; at most kMostQueued
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_DEVICE_COLLECTIVES_H_
