// Collectives of GPUs in several processes, one in each, through the memory of their hosts: what goes to
// another rank is copied to the host, sent, and copied to that rank's GPU. It needs no NCCL, and several ranks
// may have the same GPU.
//
// An exchange is enqueued in pieces: a copy to pinned memory, a function of the host that sends and receives,
// and a copy back. So no thread waits but that of CUDA's host functions, which waits at most as long as one
// transfer may take. An exchange after one that has failed does nothing, so that streams always come to their
// end.
//
// Sums are formed in the order of the ranks: all ranks get the same bits.
#ifndef LOSSD_KERNELS_CUDA_DEVICE_HOST_COLLECTIVES_H_
#define LOSSD_KERNELS_CUDA_DEVICE_HOST_COLLECTIVES_H_

#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/cuda/device/collectives.h"
#include "kernels/cuda/device/device_memory.h"
#include "kernels/host_transfers.h"

namespace lossd::kernels::cuda {

class HostCollectives final : public Collectives {
 public:
  // What one rank gets from another at a time.
  static constexpr int64_t kPieceBytes = int64_t{4} << 20;

  // Of this process's GPU, which is the current one, and its stream for all exchanges. `transfers` are
  // connected; they and `ledger` outlive the object. RESOURCE_EXHAUSTED if there is no pinned memory: a piece
  // of each rank.
  static absl::StatusOr<std::unique_ptr<HostCollectives>> Create(MemoryLedger* ledger, cudaStream_t stream,
                                                                 HostTransfers* transfers);
  // Waits until the stream has done what was enqueued.
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
  // What the host does for one piece, once this rank's bytes of it are in its room.
  struct Exchange {
    HostCollectives* collectives = nullptr;
    size_t bytes = 0;
    std::vector<int> send_to;       // the own room
    std::vector<int> receive_from;  // each into its room
    bool sums = false;              // adds up the rooms of all ranks, into the own one
  };

  HostCollectives(PinnedBuffer rooms, cudaStream_t stream, HostTransfers* transfers)
      : rooms_(std::move(rooms)), stream_(stream), transfers_(transfers) {}

  bool is(int member) const { return member == first_member(); }
  uint8_t* Room(int member) const { return rooms_.data() + member * kPieceBytes; }
  std::vector<int> Others() const;
  // Enqueues an exchange on the host. Run is what CUDA calls then.
  absl::Status Launch(Exchange exchange);
  static void Run(void* exchange);
  void Do(const Exchange& exchange);
  // Calls `piece` for parts of `bytes` that fit a room.
  static absl::Status ForPieces(int64_t bytes,
                                absl::FunctionRef<absl::Status(int64_t begin, int64_t bytes)> piece);

  const PinnedBuffer rooms_;  // [ranks, kPieceBytes]
  const cudaStream_t stream_;
  HostTransfers* const transfers_;
  mutable absl::Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_DEVICE_HOST_COLLECTIVES_H_
