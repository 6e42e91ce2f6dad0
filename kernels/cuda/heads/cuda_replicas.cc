#include "kernels/cuda/cuda_replicas.h"

#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/device/nccl.h"
#include "kernels/cuda/heads/cuda_head.h"

namespace lossd::kernels {
namespace cuda {
namespace {

class HeadReplicas final : public Replicas {
 public:
  HeadReplicas(Nccl* nccl, std::vector<CudaHead*> heads) : nccl_(nccl), heads_(std::move(heads)) {}

  // NCCL adds in an order of its own that depends on how many GPUs there are and how they are linked, not on
  // time.
  absl::Status SumGradients() override {
    LOSSD_RETURN_IF_ERROR(Synchronize());
    const auto sum = [&](int owner) {
      return ForEachRange(
          owner, [](HeadTensors& tensors) { return tensors.gradients(); },
          [&](const std::vector<Nccl::Part>& parts, int64_t floats) {
            return nccl_->Sum(parts, floats, owner);
          });
    };
    LOSSD_RETURN_IF_ERROR(Exchange(sum));
    for (size_t i = 0; i < heads_.size(); ++i) {
      for (int owner = 0; owner < nccl_->members(); ++owner) {
        if (owner == nccl_->first_member() + static_cast<int>(i)) continue;
        LOSSD_RETURN_IF_ERROR(heads_[i]->tensors().ZeroGradientsOf(ShardOfOwner(owner)));
      }
      heads_[i]->tensors().accumulators().weight_is_zero = false;
    }
    return Synchronize();
  }

  // What chunks compute with: the copy of the weight in the compute dtype, and the vectors.
  absl::Status SpreadValues() override {
    LOSSD_RETURN_IF_ERROR(Synchronize());
    const DType compute = heads_.front()->compute_dtype();
    const auto spread = [&](int owner) -> absl::Status {
      const int64_t count = WeightRange(owner).count;
      if (count > 0) {
        std::vector<Nccl::Part> parts = Parts();
        for (Nccl::Part& part : parts) {
          part.data = Tensors(part.local).ComputeWeightFrom(ShardOfOwner(owner).first_class);
        }
        LOSSD_RETURN_IF_ERROR(nccl_->Spread(parts, compute, count, owner));
      }
      return ForEachVector(
          owner, [](HeadTensors& tensors) { return tensors.values().params; },
          [&](const std::vector<Nccl::Part>& parts, int64_t floats) {
            return nccl_->Spread(parts, DType::kFloat32, floats, owner);
          });
    };
    return Exchange(spread);
  }

 private:
  using BlockOf = absl::FunctionRef<ParamBlock(HeadTensors&)>;
  using Step = absl::FunctionRef<absl::Status(const std::vector<Nccl::Part>&, int64_t floats)>;

  HeadTensors& Tensors(int local) const { return heads_[static_cast<size_t>(local)]->tensors(); }
  // Of an owner in whatever process.
  Shard ShardOfOwner(int owner) const {
    return ShardOf(heads_.front()->config().vocab_size, {owner, nccl_->members()});
  }
  ShardRanges RangesOf(int owner) const { return Tensors(0).RangesOf(ShardOfOwner(owner)); }
  ShardRange WeightRange(int owner) const { return RangesOf(owner).weight; }

  // Waits until no device has anything left to do.
  absl::Status Synchronize() {
    for (CudaHead* head : heads_) {
      LOSSD_RETURN_IF_ERROR(head->device().Enter());
      LOSSD_RETURN_IF_ERROR(head->device().Synchronize());
    }
    return absl::OkStatus();
  }

  std::vector<Nccl::Part> Parts() const {
    std::vector<Nccl::Part> parts;
    for (size_t i = 0; i < heads_.size(); ++i) {
      parts.push_back({static_cast<int>(i), nullptr, heads_[i]->device().compute()});
    }
    return parts;
  }

  // Every part of a block that `owner` updates, on all replicas.
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
    std::vector<Nccl::Part> parts = Parts();
    for (Nccl::Part& part : parts) {
      float* const first = tensor(block(Tensors(part.local)));
      if (first == nullptr || range.count == 0) return absl::OkStatus();
      part.data = first + range.begin;
    }
    return step(parts, range.count);
  }

  // Ends when the devices have done it.
  absl::Status Exchange(absl::FunctionRef<absl::Status(int owner)> of_owner) {
    const auto all = [&]() -> absl::Status {
      for (int owner = 0; owner < nccl_->members(); ++owner) LOSSD_RETURN_IF_ERROR(of_owner(owner));
      return absl::OkStatus();
    };
    absl::Status status = nccl_->Enqueue(all);
    if (status.ok()) status = nccl_->Wait(Parts());
    for (CudaHead* head : heads_) (void)head->device().Fail(status);
    return status;
  }

  Nccl* const nccl_;
  const std::vector<CudaHead*> heads_;
};

class NcclExchange final : public ClassExchange {
 public:
  NcclExchange(Nccl* nccl, int part, cudaStream_t stream) : nccl_(nccl), part_(part), stream_(stream) {}

  absl::Status Sum(float* data, int64_t n) override { return nccl_->SumOfAll(Part(data), n); }
  absl::Status Gather(const void* own, void* all, int64_t bytes) override {
    return nccl_->Gather(Part(all), own, bytes);
  }
  absl::Status SumPlaces(float* data, int64_t n) override { return nccl_->SumPlaces(Part(data), n); }
  absl::Status Wait(const Event& event) override { return nccl_->Wait(part_, event.get()); }
  void Abort(const absl::Status& reason) override {
    nccl_->Abort(absl::UnavailableError(absl::StrCat("a part of the head failed: ", reason.message())))
        .IgnoreError();
  }

 private:
  Nccl::Part Part(void* data) const { return {part_, data, stream_}; }

  Nccl* const nccl_;
  const int part_;
  const cudaStream_t stream_;
};

class NcclReplicaGroup final : public CudaReplicaGroup {
 public:
  explicit NcclReplicaGroup(std::unique_ptr<Nccl> nccl) : nccl_(std::move(nccl)) {}
  std::unique_ptr<Replicas> Connect(absl::Span<HeadKernels* const> heads) override {
    std::vector<CudaHead*> replicas;
    for (HeadKernels* head : heads) replicas.push_back(static_cast<CudaHead*>(head));
    return std::make_unique<HeadReplicas>(nccl_.get(), std::move(replicas));
  }

  absl::Status Join(absl::Span<HeadKernels* const> heads) override {
    for (size_t i = 0; i < heads.size(); ++i) {
      auto* const head = static_cast<CudaHead*>(heads[i]);
      head->Join(std::make_unique<NcclExchange>(nccl_.get(), static_cast<int>(i), head->device().compute()));
    }
    std::vector<Nccl::Part> parts;
    for (size_t i = 0; i < heads.size(); ++i) {
      auto* const head = static_cast<CudaHead*>(heads[i]);
      parts.push_back({static_cast<int>(i), head->exchange_memory().first, head->device().compute()});
    }
    return nccl_->MakeLinks(parts, static_cast<CudaHead*>(heads[0])->exchange_memory().second);
  }

 private:
  const std::unique_ptr<Nccl> nccl_;
};

// This process's GPU as one of several processes. The leader makes the id, and gives it as its address.
class NcclLink final : public RankLink {
 public:
  NcclLink(int device, Replica replica, absl::Duration timeout)
      : device_(device), replica_(replica), timeout_(timeout) {}

  absl::StatusOr<std::string> Address() override {
    return replica_.index == 0 ? Nccl::NewId() : std::string();
  }

  absl::Status Connect(const std::vector<std::string>& addresses) override {
    if (addresses.empty()) return absl::InternalError("there is no id of NCCL");
    absl::StatusOr<std::unique_ptr<Nccl>> nccl = Nccl::Join(device_, replica_, addresses.front(), timeout_);
    if (!nccl.ok()) return nccl.status();
    absl::MutexLock lock(&mutex_);
    if (!aborted_.ok()) return aborted_;
    nccl_ = *std::move(nccl);
    return absl::OkStatus();
  }

  absl::StatusOr<std::unique_ptr<Replicas>> Join(HeadKernels* head) override {
    auto* const cuda = dynamic_cast<CudaHead*>(head);
    absl::MutexLock lock(&mutex_);
    if (cuda == nullptr || nccl_ == nullptr) return absl::InternalError("no head of a connected GPU");
    return std::make_unique<HeadReplicas>(nccl_.get(), std::vector<CudaHead*>{cuda});
  }

  void Abort(const absl::Status& reason) override {
    Nccl* nccl = nullptr;
    {
      absl::MutexLock lock(&mutex_);
      aborted_.Update(reason);
      nccl = nccl_.get();
    }
    if (nccl != nullptr) nccl->Abort(reason).IgnoreError();
  }

 private:
  const int device_;
  const Replica replica_;
  const absl::Duration timeout_;
  absl::Mutex mutex_;
  absl::Status aborted_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Nccl> nccl_ ABSL_GUARDED_BY(mutex_);  // once connected, it stays
};

}  // namespace
}  // namespace cuda

std::unique_ptr<RankLink> CreateNcclLink(int device, Replica replica, absl::Duration timeout) {
  return std::make_unique<cuda::NcclLink>(device, replica, timeout);
}

absl::StatusOr<std::unique_ptr<CudaReplicaGroup>> CudaReplicaGroup::Create(std::vector<int> devices,
                                                                           absl::Duration timeout) {
  absl::StatusOr<std::unique_ptr<cuda::Nccl>> nccl = cuda::Nccl::Connect(std::move(devices), timeout);
  if (!nccl.ok()) return nccl.status();
  return std::make_unique<cuda::NcclReplicaGroup>(*std::move(nccl));
}

}  // namespace lossd::kernels
