// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/heads/head_replicas.h"

#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "kernels/cuda/device/cuda_status.h"

namespace lossd::kernels::cuda {
namespace {

class HeadReplicas final : public Replicas {
 public:
  HeadReplicas(std::shared_ptr<Collectives> collectives, std::vector<CudaHead*> heads)
      : collectives_(std::move(collectives)), heads_(std::move(heads)) {}

  // NCCL adds in an order of its own that depends on how many GPUs there are and how they are linked, not on
  // time; through the hosts, ranks are added in their order.
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
    for (size_t i = 0; i < heads_.size(); ++i) {
      for (int owner = 0; owner < collectives_->members(); ++owner) {
        if (owner == collectives_->first_member() + static_cast<int>(i)) continue;
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
  // Of an owner in whatever process.
  Shard ShardOfOwner(int owner) const {
    return ShardOf(Tensors(0).classes(), {owner, collectives_->members()});
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

  std::vector<Collectives::Part> Parts() const {
    std::vector<Collectives::Part> parts;
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
    std::vector<Collectives::Part> parts = Parts();
    for (Collectives::Part& part : parts) {
      float* const first = tensor(block(Tensors(part.local)));
      if (first == nullptr || range.count == 0) return absl::OkStatus();
      part.data = first + range.begin;
    }
    return step(parts, range.count);
  }

  // All of the weight of a block, on all replicas.
  absl::Status OnWeight(BlockOf block,
                        absl::FunctionRef<absl::Status(const std::vector<Collectives::Part>&)> step) const {
    return OnRange(
        {0, 1}, [](const ParamBlock& b) { return b.weight; }, block,
        [&](const std::vector<Collectives::Part>& parts, int64_t) { return step(parts); });
  }

  // The elements of the weight that each owner has, padding included, if all have as many; else 0.
  int64_t EvenShard() const {
    const int64_t each = WeightRange(0).count;
    for (int owner = 1; owner < collectives_->members(); ++owner) {
      if (WeightRange(owner).count != each) return 0;
    }
    return each;
  }

  // The weight, all shards at once where they are even, else those of one owner after the other, and the
  // vectors. Ends when the devices have done it.
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
    for (CudaHead* head : heads_) (void)head->device().Fail(status);
    return status;
  }

  const std::shared_ptr<Collectives> collectives_;
  const std::vector<CudaHead*> heads_;
};

// The replicas of a head that is split by vocabulary. Each place has replicas on GPUs of its own, so the
// places work at the same time.
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

}  // namespace

std::unique_ptr<Replicas> MakePlacesReplicas(std::vector<std::unique_ptr<Replicas>> places) {
  return std::make_unique<PlacesReplicas>(std::move(places));
}

std::unique_ptr<Replicas> MakeHeadReplicas(std::shared_ptr<Collectives> collectives,
                                           std::vector<CudaHead*> heads) {
  return std::make_unique<HeadReplicas>(std::move(collectives), std::move(heads));
}

}  // namespace lossd::kernels::cuda
