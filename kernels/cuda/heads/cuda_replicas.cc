// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/cuda_replicas.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/device/class_exchange.h"
#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/device/nccl.h"
#include "kernels/cuda/device/stream_timer.h"
#include "kernels/cuda/heads/cuda_head.h"
#include "kernels/cuda/heads/head_replicas.h"
#include "kernels/shard_rows.h"

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

// The connections of replicas that divide classes.
struct Grid {
  std::vector<std::shared_ptr<Nccl>> replicas;  // of each, its GPUs
  std::vector<std::shared_ptr<Nccl>> places;    // of each, the GPUs that have the same classes
};

absl::StatusOr<std::shared_ptr<Nccl>> ConnectLinked(std::vector<int> devices, absl::Duration timeout) {
  absl::StatusOr<std::unique_ptr<Nccl>> nccl = Nccl::Connect(std::move(devices), timeout);
  if (!nccl.ok()) return nccl.status();
  if (absl::Status linked = (*nccl)->MakeLinks(); !linked.ok()) return linked;
  return std::shared_ptr<Nccl>(*std::move(nccl));
}

class NcclReplicaGroup final : public CudaReplicaGroup {
 public:
  NcclReplicaGroup(std::shared_ptr<Nccl> nccl, std::vector<int> devices, absl::Duration timeout)
      : nccl_(std::move(nccl)),
        devices_(std::move(devices)),
        timeout_(timeout),
        exchanges_(std::make_shared<MemberExchanges>(nccl_->members())) {
    for (ExchangeClocks* const clocks : exchanges_->All()) {
      timers_.push_back(std::make_unique<StreamTimer>(clocks));
    }
  }
  const std::shared_ptr<MemberExchanges>& exchanges() const override { return exchanges_; }
  absl::StatusOr<std::unique_ptr<Replicas>> Connect(absl::Span<HeadKernels* const> heads) override {
    const auto places = static_cast<size_t>(PlacesOf(heads));
    const absl::StatusOr<const Grid*> grid = GridOf(places);
    if (!grid.ok()) return grid.status();
    std::vector<std::unique_ptr<Replicas>> all;
    for (size_t place = 0; place < places; ++place) {
      std::vector<CudaHead*> replicas;
      for (size_t i = place; i < heads.size(); i += places) {
        replicas.push_back(static_cast<CudaHead*>(heads[i]));
      }
      all.push_back(MakeHeadReplicas((*grid)->places[place], std::move(replicas)));
    }
    if (places == 1) return std::move(all.front());
    return MakePlacesReplicas(std::move(all));
  }

  absl::Status Join(absl::Span<HeadKernels* const> heads) override {
    const auto places = static_cast<size_t>(PlacesOf(heads));
    const absl::StatusOr<const Grid*> grid = GridOf(places);
    if (!grid.ok()) return grid.status();
    for (size_t i = 0; i < heads.size(); ++i) {
      auto* const head = static_cast<CudaHead*>(heads[i]);
      head->Join(std::make_unique<NcclExchange>((*grid)->replicas[i / places].get(),
                                                static_cast<int>(i % places), head->device().compute(),
                                                timers_[i].get()));
    }
    return absl::OkStatus();
  }

 private:
  static int PlacesOf(absl::Span<HeadKernels* const> heads) {
    return kernels::PlacesOf(heads.front()->config(), static_cast<int>(heads.size()));
  }

  // Made for the first head that needs it, and kept. One replica on all GPUs, and replicas of one GPU, take
  // the connection of all.
  absl::StatusOr<const Grid*> GridOf(size_t places) {
    const auto made = grids_.find(places);
    if (made != grids_.end()) return &made->second;
    const size_t replicas = devices_.size() / places;
    Grid grid;
    for (size_t replica = 0; replica < replicas && places > 1; ++replica) {
      const auto first = devices_.begin() + static_cast<std::ptrdiff_t>(replica * places);
      LOSSD_RETURN_IF_ERROR(Add({first, first + static_cast<std::ptrdiff_t>(places)}, grid.replicas));
    }
    for (size_t place = 0; place < places && replicas > 1; ++place) {
      std::vector<int> devices;
      for (size_t i = place; i < devices_.size(); i += places) devices.push_back(devices_[i]);
      LOSSD_RETURN_IF_ERROR(Add(std::move(devices), grid.places));
    }
    return &grids_.emplace(places, std::move(grid)).first->second;
  }

  absl::Status Add(std::vector<int> devices, std::vector<std::shared_ptr<Nccl>>& connections) const {
    if (devices == devices_) {
      connections.push_back(nccl_);
      return absl::OkStatus();
    }
    absl::StatusOr<std::shared_ptr<Nccl>> connection = ConnectLinked(std::move(devices), timeout_);
    if (connection.ok()) connections.push_back(*std::move(connection));
    return connection.status();
  }

  const std::shared_ptr<Nccl> nccl_;
  const std::vector<int> devices_;
  const absl::Duration timeout_;
  std::map<size_t, Grid> grids_;  // by places
  const std::shared_ptr<MemberExchanges> exchanges_;
  std::vector<std::unique_ptr<StreamTimer>> timers_;  // by replica
};

}  // namespace
}  // namespace cuda

absl::StatusOr<std::unique_ptr<CudaReplicaGroup>> CudaReplicaGroup::Create(std::vector<int> devices,
                                                                           absl::Duration timeout) {
  absl::StatusOr<std::shared_ptr<cuda::Nccl>> nccl = cuda::ConnectLinked(devices, timeout);
  if (!nccl.ok()) return nccl.status();
  return std::make_unique<cuda::NcclReplicaGroup>(*std::move(nccl), std::move(devices), timeout);
}

}  // namespace lossd::kernels
