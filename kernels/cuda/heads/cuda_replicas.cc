// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/cuda_replicas.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/device/class_exchange.h"
#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/device/nccl.h"
#include "kernels/cuda/device/stream_timer.h"
#include "kernels/cuda/heads/cuda_head.h"
#include "kernels/cuda/heads/head_replicas.h"

namespace lossd::kernels {
namespace cuda {
namespace {

class NcclExchange final : public ClassExchange {
 public:
  NcclExchange(Nccl* nccl, int part, cudaStream_t stream, StreamTimer* timer)
      : nccl_(nccl), part_(part), stream_(stream), timer_(timer) {}

  absl::Status Sum(ExchangeKind kind, float* data, int64_t n) override {
    return timer_->Time(kind, stream_, [&] { return nccl_->SumOfAll(Part(data), n); });
  }
  absl::Status Gather(const void* own, void* all, int64_t bytes) override {
    return timer_->Time(ExchangeKind::kRowStatistics, stream_,
                        [&] { return nccl_->Gather(Part(all), own, bytes); });
  }
  // The rows are divided evenly.
  RowRange RowsHere(int64_t rows) const override {
    const int64_t each = RowsOfEach(rows), begin = std::min(rows, part_ * each);
    return {begin, std::min(rows, begin + each)};
  }
  absl::Status SumRows(float* data, int64_t rows, int64_t cols) override {
    return timer_->Time(ExchangeKind::kHiddenGradients, stream_,
                        [&] { return nccl_->SumPlaces(Part(data), RowsOfEach(rows) * cols); });
  }
  absl::Status Watched(absl::FunctionRef<absl::Status()> enqueue) override { return nccl_->Watched(enqueue); }
  absl::Status Wait(const Event& event) override {
    absl::Status status = nccl_->Wait(part_, event.get());
    timer_->Collect();
    return status;
  }
  void Abort(const absl::Status& reason) override {
    nccl_->Abort(absl::UnavailableError(absl::StrCat("a part of the head failed: ", reason.message())))
        .IgnoreError();
  }

 private:
  Nccl::Part Part(void* data) const { return {part_, data, stream_}; }
  int64_t RowsOfEach(int64_t rows) const { return CeilDiv(rows, nccl_->members()); }

  Nccl* const nccl_;
  const int part_;
  const cudaStream_t stream_;
  StreamTimer* const timer_;
};

class NcclReplicaGroup final : public CudaReplicaGroup {
 public:
  explicit NcclReplicaGroup(std::unique_ptr<Nccl> nccl)
      : nccl_(std::move(nccl)), exchanges_(std::make_shared<MemberExchanges>(nccl_->members())) {
    for (ExchangeClocks* const clocks : exchanges_->All()) {
      timers_.push_back(std::make_unique<StreamTimer>(clocks));
    }
  }
  const std::shared_ptr<MemberExchanges>& exchanges() const override { return exchanges_; }
  std::unique_ptr<Replicas> Connect(absl::Span<HeadKernels* const> heads) override {
    std::vector<CudaHead*> replicas;
    for (HeadKernels* head : heads) replicas.push_back(static_cast<CudaHead*>(head));
    return MakeHeadReplicas(nccl_, std::move(replicas));
  }

  absl::Status Join(absl::Span<HeadKernels* const> heads) override {
    for (size_t i = 0; i < heads.size(); ++i) {
      auto* const head = static_cast<CudaHead*>(heads[i]);
      head->Join(std::make_unique<NcclExchange>(nccl_.get(), static_cast<int>(i), head->device().compute(),
                                                timers_[i].get()));
    }
    return absl::OkStatus();
  }

 private:
  const std::shared_ptr<Nccl> nccl_;
  const std::shared_ptr<MemberExchanges> exchanges_;
  std::vector<std::unique_ptr<StreamTimer>> timers_;  // by replica
};

}  // namespace
}  // namespace cuda

absl::StatusOr<std::unique_ptr<CudaReplicaGroup>> CudaReplicaGroup::Create(std::vector<int> devices,
                                                                           absl::Duration timeout) {
  absl::StatusOr<std::unique_ptr<cuda::Nccl>> nccl = cuda::Nccl::Connect(std::move(devices), timeout);
  if (!nccl.ok()) return nccl.status();
  if (absl::Status linked = (*nccl)->MakeLinks(); !linked.ok()) return linked;
  return std::make_unique<cuda::NcclReplicaGroup>(*std::move(nccl));
}

}  // namespace lossd::kernels
