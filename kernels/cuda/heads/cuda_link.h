// SPDX-License-Identifier: Apache-2.0
// RankClassExchange: the exchange between the parts of a head that is split by vocabulary, if each part is in
// a process of its own with one GPU. Rank 0 delivers the results of all rows. cuda_link.cc also implements
// the links between ranks and between the GPUs of a process (cuda_backend.h), with the sums of gradients and
// the copies of values over the replicas of a head.
#ifndef LOSSD_KERNELS_CUDA_HEADS_CUDA_LINK_H_
#define LOSSD_KERNELS_CUDA_HEADS_CUDA_LINK_H_

#include <functional>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/device/collectives.h"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/device/event_waiter.h"

namespace lossd::kernels::cuda {

// Called when a chunk's exchange has failed (RankLink::WatchChunks).
using OnChunkFailure = std::function<absl::Status(const absl::Status&)>;

// Enqueues each exchange on the compute stream of this process's GPU. Threads and errors as in ClassExchange.
class RankClassExchange final : public ClassExchange {
 public:
  // `timer` and `on_failure` outlive the object. The function *on_failure may be set until the first chunk.
  RankClassExchange(std::shared_ptr<Collectives> collectives, cudaStream_t stream, StreamTimer* timer,
                    const OnChunkFailure* on_failure)
      : collectives_(std::move(collectives)), stream_(stream), timer_(timer), on_failure_(on_failure) {}

  absl::Status Sum(ExchangeKind kind, float* data, int64_t n) override {
    return timer_->Time(kind, stream_, [&] { return collectives_->SumOfAll(Part(data), n); });
  }
  absl::Status Gather(const void* own, void* all, int64_t bytes) override {
    return timer_->Time(ExchangeKind::kRowStatistics, stream_,
                        [&] { return collectives_->Gather(Part(all), own, bytes); });
  }
  // All rows on rank 0, and none on other ranks.
  RowRange RowsHere(int64_t rows) const override {
    return {collectives_->first_member() == 0 ? 0 : rows, rows};
  }
  absl::Status SumRows(float* data, int64_t rows, int64_t cols) override {
    return timer_->Time(ExchangeKind::kHiddenGradients, stream_, [&] {
      return collectives_->Enqueue([&] { return collectives_->Sum({Part(data)}, rows * cols, /*root=*/0); });
    });
  }

  absl::Status Watched(absl::FunctionRef<absl::Status()> enqueue) override {
    return collectives_->Watched(enqueue);
  }
  absl::Status Wait(const Event& event) override {
    absl::Status status = collectives_->Wait(/*local=*/0, event.get());
    timer_->Collect();
    return status.ok() ? status : Tell(std::move(status));
  }
  void Abort(const absl::Status& reason) override {
    const std::string message = absl::StrCat("a part of the head failed: ", reason.message());
    Tell(collectives_->Abort(absl::UnavailableError(message))).IgnoreError();
  }

 private:
  Collectives::Part Part(void* data) const { return {0, data, stream_}; }
  // Tells the owner of the link that the chunk's exchange has failed, and returns the status to report.
  absl::Status Tell(absl::Status failure) const {
    return *on_failure_ ? (*on_failure_)(failure) : std::move(failure);
  }

  const std::shared_ptr<Collectives> collectives_;
  const cudaStream_t stream_;
  StreamTimer* const timer_;
  const OnChunkFailure* const on_failure_;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_HEADS_CUDA_LINK_H_
