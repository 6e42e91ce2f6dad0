// SPDX-License-Identifier: Apache-2.0
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
#ifndef LOSSD_KERNELS_CUDA_DEVICE_HOST_COLLECTIVES_H_
#define LOSSD_KERNELS_CUDA_DEVICE_HOST_COLLECTIVES_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/cuda/device/collectives.h"
#include "kernels/cuda/device/device_memory.h"
#include "kernels/replica.h"

namespace lossd::kernels::cuda {

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

#endif  // LOSSD_KERNELS_CUDA_DEVICE_HOST_COLLECTIVES_H_
