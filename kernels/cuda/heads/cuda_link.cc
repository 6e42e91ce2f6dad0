// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/heads/cuda_link.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/device/event_waiter.h"
#include "kernels/cuda/device/host_collectives.h"
#include "kernels/cuda/device/nccl.h"
#include "kernels/cuda/heads/cuda_head.h"
#include "kernels/cuda/heads/head_replicas.h"
#include "kernels/errors/field_error.h"
#include "kernels/validation.h"

namespace lossd::kernels {
namespace cuda {
namespace {

absl::StatusOr<CudaHead*> CudaHeadOf(HeadKernels* head) {
  auto* const cuda = dynamic_cast<CudaHead*>(head);
  if (cuda == nullptr) return errors::FieldError("head", "be one of a CUDA backend", "another one");
  return cuda;
}

// The leader makes NCCL's id, and gives it as its address.
class CudaLink final : public RankLink {
 public:
  CudaLink(const CudaLinkOptions& options, std::vector<std::string> offered,
           std::unique_ptr<HostTransfers> transfers)
      : device_(options.device),
        replica_(options.replica),
        timeout_(options.timeout),
        plan_memory_(options.plan_memory),
        offered_(std::move(offered)),
        transfers_(std::move(transfers)) {}

  RankTraits Traits() const override;
  std::vector<std::string> CollectivesOffered() const override { return offered_; }
  absl::Status UseCollectives(const std::string& collectives) override;
  absl::StatusOr<std::string> Address() override;
  absl::Status Connect(const std::vector<std::string>& addresses) override;
  absl::StatusOr<std::unique_ptr<Replicas>> Join(HeadKernels* head) override;
  absl::Status JoinClasses(HeadKernels* head) override;
  void WatchChunks(OnChunkFailure on_failure) override { on_chunk_failure_ = std::move(on_failure); }
  ExchangeTimes Times() const override { return clocks_.Totals(); }
  void Abort(const absl::Status& reason) override;

 private:
  absl::StatusOr<std::unique_ptr<Collectives>> ConnectByNccl(const std::vector<std::string>& addresses) const;
  absl::StatusOr<std::unique_ptr<Collectives>> ConnectThroughHosts(
      const std::vector<std::string>& addresses) const;
  absl::StatusOr<std::shared_ptr<Collectives>> Connected() const ABSL_LOCKS_EXCLUDED(mutex_);

  const int device_;
  const Replica replica_;
  const absl::Duration timeout_;
  const std::function<absl::Status(int64_t)> plan_memory_;
  const std::vector<std::string> offered_;
  const std::unique_ptr<HostTransfers> transfers_;  // null: not offered
  bool by_nccl_ = false;                            // set once, before Address
  ExchangeClocks clocks_;
  StreamTimer timer_{&clocks_};
  OnChunkFailure on_chunk_failure_;
  mutable absl::Mutex mutex_;
  absl::Status aborted_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<Collectives> collectives_ ABSL_GUARDED_BY(mutex_);  // once connected, they stay
};

RankTraits CudaLink::Traits() const {
  RankTraits traits;
  cudaDeviceProp properties = {};
  if (cudaGetDeviceProperties(&properties, device_) == cudaSuccess) {
    traits.device_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  }
  if (std::find(offered_.begin(), offered_.end(), kNccl) != offered_.end()) {
    traits.nccl_version = Nccl::Version().value_or("");
  }
  return traits;
}

absl::Status CudaLink::UseCollectives(const std::string& collectives) {
  if (std::find(offered_.begin(), offered_.end(), collectives) == offered_.end()) {
    return errors::FieldError("collectives", absl::StrCat("be one of ", absl::StrJoin(offered_, ", ")),
                              collectives);
  }
  by_nccl_ = collectives == kNccl;
  return absl::OkStatus();
}

absl::StatusOr<std::string> CudaLink::Address() {
  if (!by_nccl_) return transfers_->Address();
  return replica_.index == 0 ? Nccl::NewId() : std::string();
}

absl::Status CudaLink::Connect(const std::vector<std::string>& addresses) {
  absl::StatusOr<std::unique_ptr<Collectives>> made =
      by_nccl_ ? ConnectByNccl(addresses) : ConnectThroughHosts(addresses);
  if (!made.ok()) return made.status();
  absl::MutexLock lock(&mutex_);
  if (!aborted_.ok()) return aborted_;
  collectives_ = *std::move(made);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Collectives>> CudaLink::ConnectByNccl(
    const std::vector<std::string>& addresses) const {
  if (addresses.empty()) return absl::InternalError("there is no id of NCCL");
  return Nccl::Join(device_, replica_, addresses.front(), timeout_);
}

absl::StatusOr<std::unique_ptr<Collectives>> CudaLink::ConnectThroughHosts(
    const std::vector<std::string>& addresses) const {
  LOSSD_RETURN_IF_ERROR(plan_memory_(HostCollectives::MemoryBytes(replica_.count)));
  LOSSD_RETURN_IF_ERROR(transfers_->Connect(addresses));
  return HostCollectives::Create(device_, transfers_.get());
}

absl::StatusOr<std::shared_ptr<Collectives>> CudaLink::Connected() const {
  absl::MutexLock lock(&mutex_);
  if (collectives_ == nullptr) return absl::InternalError("the ranks are not connected");
  return collectives_;
}

absl::StatusOr<std::unique_ptr<Replicas>> CudaLink::Join(HeadKernels* head) {
  const absl::StatusOr<CudaHead*> cuda = CudaHeadOf(head);
  if (!cuda.ok()) return cuda.status();
  absl::StatusOr<std::shared_ptr<Collectives>> collectives = Connected();
  if (!collectives.ok()) return collectives.status();
  return std::make_unique<TimedReplicas>(MakeHeadReplicas(*std::move(collectives), {*cuda}),
                                         std::vector<ExchangeClocks*>{&clocks_});
}

absl::Status CudaLink::JoinClasses(HeadKernels* head) {
  const absl::StatusOr<CudaHead*> cuda = CudaHeadOf(head);
  if (!cuda.ok()) return cuda.status();
  if ((*cuda)->config().split != Split::kVocabulary) {
    return errors::FieldError("split", "be vocabulary", Name((*cuda)->config().split));
  }
  absl::StatusOr<std::shared_ptr<Collectives>> collectives = Connected();
  if (!collectives.ok()) return collectives.status();
  (*cuda)->Join(std::make_unique<RankClassExchange>(*std::move(collectives), (*cuda)->device().compute(),
                                                    &timer_, &on_chunk_failure_));
  return absl::OkStatus();
}

void CudaLink::Abort(const absl::Status& reason) {
  std::shared_ptr<Collectives> collectives;
  {
    absl::MutexLock lock(&mutex_);
    aborted_.Update(reason);
    collectives = collectives_;
  }
  if (transfers_ != nullptr) transfers_->Abort(reason);  // they may be connecting
  if (collectives != nullptr) collectives->Abort(reason).IgnoreError();
}

}  // namespace
}  // namespace cuda

absl::StatusOr<std::unique_ptr<RankLink>> CreateCudaLink(const CudaLinkOptions& options) {
  const std::string& wanted = options.collectives;
  std::vector<std::string> offered;
  absl::Status missing;
  if (wanted != kGloo) {
    missing = cuda::Nccl::CheckLoads();
    if (missing.ok()) offered.emplace_back(kNccl);
  }
  std::unique_ptr<HostTransfers> transfers;
  if (wanted != kNccl) {
    absl::StatusOr<std::unique_ptr<HostTransfers>> made = options.make_transfers();
    if (made.ok()) {
      transfers = *std::move(made);
      offered.emplace_back(kGloo);
    } else {
      missing.Update(made.status());
    }
  }
  if (offered.empty()) {
    return errors::FieldError("collectives", absl::StrCat("be what is there: ", missing.message()), wanted);
  }
  return std::make_unique<cuda::CudaLink>(options, std::move(offered), std::move(transfers));
}

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
