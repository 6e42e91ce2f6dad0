// SPDX-License-Identifier: Apache-2.0
// Exchanges between GPUs: sums of gradients and copies of values over replicas (HeadReplicas), the link of a
// rank (CudaLink, for CreateCudaLink), and the GPUs of one process (NcclReplicaGroup, for
// CudaReplicaGroup::Create).
//
// Replicas are copies of a head on several GPUs. At a step each replica updates only its shard, a range of
// the classes, and is the owner of this shard: SumGradients adds up the gradients of each shard at its owner,
// the owners apply the optimizer, and SpreadValues copies the new values of each shard from its owner to all
// others.
//
// If a head is split by vocabulary, each copy of it takes several GPUs, and a place is the number of a GPU
// within its copy. GPU i has place i % places of copy i / places. The GPUs of one copy exchange rows while a
// chunk is computed (ClassExchange). The GPUs of one place have the same classes, so they are replicas of
// each other.
#include "kernels/cuda/heads/cuda_link.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "kernels/backend.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/device/collectives.h"
#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/device/event_waiter.h"
#include "kernels/cuda/heads/cuda_head.h"
#include "kernels/errors/field_error.h"
#include "kernels/validation.h"

namespace lossd::kernels {
namespace cuda {
namespace {

// ---- Sums of gradients and copies of values over the replicas of a head ----

// The replicas of one head, or of one place of a split head. `heads`: the replicas in this process. A member
// of `collectives` is a replica, in this process or another.
class HeadReplicas final : public Replicas {
 public:
  HeadReplicas(std::shared_ptr<Collectives> collectives, std::vector<CudaHead*> heads)
      : collectives_(std::move(collectives)), heads_(std::move(heads)) {}

  // NCCL adds in an order of its own. The order depends on the number of GPUs and on the links between them,
  // but not on time. HostCollectives add in the order of the ranks.
  absl::Status SumGradients() override {
    LOSSD_RETURN_IF_ERROR(Synchronize());
    const auto gradients = [](HeadTensors& tensors) { return tensors.gradients(); };
    const auto sum_weight = [&](int64_t each) {
      return OnWeight(gradients, [&](const auto& parts) { return collectives_->SumShards(parts, each); });
    };
    const auto sum = [&](int owner, bool with_weight) {
      const auto step = [&](const std::vector<Collectives::Part>& parts, int64_t floats) {
        return collectives_->Sum(parts, floats, owner);
      };
      return with_weight ? ForEachRange(owner, gradients, step) : ForEachVector(owner, gradients, step);
    };
    LOSSD_RETURN_IF_ERROR(Exchange(sum_weight, sum));
    // The sums are at the owners now. What a replica has added to the shards of others counts no more.
    for (size_t i = 0; i < heads_.size(); ++i) {
      for (int owner = 0; owner < collectives_->members(); ++owner) {
        if (owner == collectives_->first_member() + static_cast<int>(i)) continue;
        LOSSD_RETURN_IF_ERROR(heads_[i]->tensors().ZeroGradientsOf(ShardOfOwner(owner)));
      }
      heads_[i]->tensors().accumulators().weight_is_zero = false;
    }
    return Synchronize();
  }

  // Copies the values that chunks compute with: the weight in the compute dtype, and the vectors.
  absl::Status SpreadValues() override {
    LOSSD_RETURN_IF_ERROR(Synchronize());
    const DType compute = heads_.front()->compute_dtype();
    const auto weight_from = [&](int64_t first_class) {
      std::vector<Collectives::Part> parts = Parts();
      for (Collectives::Part& part : parts) {
        part.data = Tensors(part.local).ComputeWeightFrom(first_class);
      }
      return parts;
    };
    const auto spread_weight = [&](int64_t each) {
      return collectives_->SpreadShards(weight_from(0), compute, each);
    };
    const auto spread = [&](int owner, bool with_weight) -> absl::Status {
      const int64_t count = WeightRange(owner).count;
      if (with_weight && count > 0) {
        LOSSD_RETURN_IF_ERROR(
            collectives_->Spread(weight_from(ShardOfOwner(owner).first_class), compute, count, owner));
      }
      return ForEachVector(
          owner, [](HeadTensors& tensors) { return tensors.values().params; },
          [&](const std::vector<Collectives::Part>& parts, int64_t floats) {
            return collectives_->Spread(parts, DType::kFloat32, floats, owner);
          });
    };
    return Exchange(spread_weight, spread);
  }

 private:
  using BlockOf = absl::FunctionRef<ParamBlock(HeadTensors&)>;
  using Step = absl::FunctionRef<absl::Status(const std::vector<Collectives::Part>&, int64_t floats)>;

  HeadTensors& Tensors(int local) const { return heads_[static_cast<size_t>(local)]->tensors(); }
  // The shard of an owner, which may be in another process.
  Shard ShardOfOwner(int owner) const {
    return ShardOf(Tensors(0).classes(), {owner, collectives_->members()});
  }
  ShardRanges RangesOf(int owner) const { return Tensors(0).RangesOf(ShardOfOwner(owner)); }
  ShardRange WeightRange(int owner) const { return RangesOf(owner).weight; }

  // Waits until all devices are idle.
  absl::Status Synchronize() {
    for (CudaHead* head : heads_) {
      LOSSD_RETURN_IF_ERROR(head->device().MakeCurrent());
      LOSSD_RETURN_IF_ERROR(head->device().Synchronize());
    }
    return absl::OkStatus();
  }

  std::vector<Collectives::Part> Parts() const {
    std::vector<Collectives::Part> parts;
    for (size_t i = 0; i < heads_.size(); ++i) {
      parts.push_back({static_cast<int>(i), nullptr, heads_[i]->device().compute()});
    }
    return parts;
  }

  // Calls `step` for each range of a block that `owner` updates, with the parts of all replicas.
  absl::Status ForEachRange(int owner, BlockOf block, Step step) const {
    const auto weight = [](const ParamBlock& b) { return b.weight; };
    LOSSD_RETURN_IF_ERROR(OnRange(WeightRange(owner), weight, block, step));
    return ForEachVector(owner, block, step);
  }

  absl::Status ForEachVector(int owner, BlockOf block, Step step) const {
    const ShardRanges ranges = RangesOf(owner);
    LOSSD_RETURN_IF_ERROR(OnRange(
        ranges.bias, [](const ParamBlock& b) { return b.bias; }, block, step));
    LOSSD_RETURN_IF_ERROR(OnRange(
        ranges.norm, [](const ParamBlock& b) { return b.norm_gain; }, block, step));
    return OnRange(
        ranges.norm, [](const ParamBlock& b) { return b.norm_shift; }, block, step);
  }

  absl::Status OnRange(ShardRange range, absl::FunctionRef<float*(const ParamBlock&)> tensor, BlockOf block,
                       Step step) const {
    std::vector<Collectives::Part> parts = Parts();
    for (Collectives::Part& part : parts) {
      float* const first = tensor(block(Tensors(part.local)));
      if (first == nullptr || range.count == 0) return absl::OkStatus();
      part.data = first + range.begin;
    }
    return step(parts, range.count);
  }

  // Calls `step` with the whole weight of a block, on all replicas. `step` knows the size of the weight; the
  // range of one element only says where the weight begins, and that it is not empty.
  absl::Status OnWeight(BlockOf block,
                        absl::FunctionRef<absl::Status(const std::vector<Collectives::Part>&)> step) const {
    return OnRange(
        {0, 1}, [](const ParamBlock& b) { return b.weight; }, block,
        [&](const std::vector<Collectives::Part>& parts, int64_t) { return step(parts); });
  }

  // The number of weight elements of each owner, padding included, if all owners have the same number; else
  // 0.
  int64_t EvenShard() const {
    const int64_t each = WeightRange(0).count;
    for (int owner = 1; owner < collectives_->members(); ++owner) {
      if (WeightRange(owner).count != each) return 0;
    }
    return each;
  }

  // Exchanges the weight and the vectors, and waits until the devices are done. The weight goes in one
  // exchange if all shards have the same size, else by owner.
  absl::Status Exchange(absl::FunctionRef<absl::Status(int64_t each)> of_weight,
                        absl::FunctionRef<absl::Status(int owner, bool with_weight)> of_owner) {
    const int64_t each = EvenShard();
    const auto all = [&]() -> absl::Status {
      if (each > 0) LOSSD_RETURN_IF_ERROR(of_weight(each));
      for (int owner = 0; owner < collectives_->members(); ++owner) {
        LOSSD_RETURN_IF_ERROR(of_owner(owner, /*with_weight=*/each == 0));
      }
      return absl::OkStatus();
    };
    absl::Status status = collectives_->Enqueue(all);
    if (status.ok()) status = collectives_->Wait(Parts());
    for (CudaHead* head : heads_) (void)head->device().Fail(status);  // remembers UNAVAILABLE
    return status;
  }

  const std::shared_ptr<Collectives> collectives_;
  const std::vector<CudaHead*> heads_;
};

// The replicas of a head that is split by vocabulary. A place is a part of the classes. Each place has its
// replicas on GPUs of its own, so all places exchange at the same time.
class PlacesReplicas final : public Replicas {
 public:
  explicit PlacesReplicas(std::vector<std::unique_ptr<Replicas>> places) : places_(std::move(places)) {}

  absl::Status SumGradients() override {
    return AtOnce([](Replicas& place) { return place.SumGradients(); });
  }
  absl::Status SpreadValues() override {
    return AtOnce([](Replicas& place) { return place.SpreadValues(); });
  }

 private:
  absl::Status AtOnce(absl::FunctionRef<absl::Status(Replicas&)> exchange) const {
    std::vector<absl::Status> results(places_.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < places_.size(); ++i) {
      threads.emplace_back([this, i, &results, exchange] { results[i] = exchange(*places_[i]); });
    }
    for (std::thread& thread : threads) thread.join();
    absl::Status first;
    for (absl::Status& result : results) first.Update(std::move(result));
    return first;
  }

  const std::vector<std::unique_ptr<Replicas>> places_;
};

// Joins the replicas of the places of a split head; each place uses other GPUs.
std::unique_ptr<Replicas> MakePlacesReplicas(std::vector<std::unique_ptr<Replicas>> places) {
  return std::make_unique<PlacesReplicas>(std::move(places));
}

// `heads`: one on each GPU of this process, in the order of the GPUs. The heads, and the objects that
// `collectives` use, outlive the result.
std::unique_ptr<Replicas> MakeHeadReplicas(std::shared_ptr<Collectives> collectives,
                                           std::vector<CudaHead*> heads) {
  return std::make_unique<HeadReplicas>(std::move(collectives), std::move(heads));
}

// ---- The link of a process with one GPU to the other ranks ----

absl::StatusOr<CudaHead*> CudaHeadOf(HeadKernels* head) {
  auto* const cuda = dynamic_cast<CudaHead*>(head);
  if (cuda == nullptr) return errors::FieldError("head", "be one of a CUDA backend", "another one");
  return cuda;
}

// A RankLink by NCCL, or through host memory. With NCCL, the leader's Address() is the id of the NCCL
// communicator, which the leader makes.
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
  const std::unique_ptr<HostTransfers> transfers_;  // null: gloo is not offered
  bool by_nccl_ = false;                            // set once, before Address
  ExchangeClocks clocks_;
  StreamTimer timer_{&clocks_};
  OnChunkFailure on_chunk_failure_;
  mutable absl::Mutex mutex_;
  absl::Status aborted_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<Collectives> collectives_ ABSL_GUARDED_BY(mutex_);  // never replaced once set
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
  if (!aborted_.ok()) return aborted_;  // Abort came while the ranks connected, and has not seen `made`
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
  if (transfers_ != nullptr) transfers_->Abort(reason);  // the transfers may still be connecting
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

// The exchange between the parts of a split head, if all parts are on GPUs of this process. `part` is the
// place of this part. Every part delivers the results of its share of the rows (RowsHere).
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
  // Rows are divided evenly among the parts.
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

// The connections among replicas of a head that is split by vocabulary.
struct Grid {
  std::vector<std::shared_ptr<Nccl>> replicas;  // for each replica, among its GPUs
  std::vector<std::shared_ptr<Nccl>> places;    // for each place, among the GPUs that have its classes
};

// Connects the GPUs, and makes the links that their exchanges need in advance (Nccl::MakeLinks).
absl::StatusOr<std::shared_ptr<Nccl>> ConnectLinked(std::vector<int> devices, absl::Duration timeout) {
  absl::StatusOr<std::unique_ptr<Nccl>> nccl = Nccl::Connect(std::move(devices), timeout);
  if (!nccl.ok()) return nccl.status();
  if (absl::Status linked = (*nccl)->MakeLinks(); !linked.ok()) return linked;
  return std::shared_ptr<Nccl>(*std::move(nccl));
}

// The GPUs of one process. `nccl` connects all of them, in the order of `devices`.
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

  // The connections for `places` places. They are made for the first head that needs them, and kept. If there
  // is only one replica, or each replica has only one GPU, the existing connection of all GPUs is used.
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

  // Appends a connection of these GPUs.
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
  std::map<size_t, Grid> grids_;  // key: number of places
  const std::shared_ptr<MemberExchanges> exchanges_;
  std::vector<std::unique_ptr<StreamTimer>> timers_;  // one for each GPU
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
