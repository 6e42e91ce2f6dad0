// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu_replicas.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/class_exchange.h"
#include "kernels/cpu/cpu_head.h"
#include "kernels/cpu/cpu_params.h"
#include "kernels/cpu/parallel_for.h"
#include "kernels/errors/field_error.h"
#include "kernels/validation.h"

namespace lossd::kernels {

absl::StatusOr<std::vector<CpuHead*>> CpuPartsOf(absl::Span<HeadKernels* const> heads) {
  std::vector<CpuHead*> parts;
  for (HeadKernels* kernels : heads) {
    auto* const head = dynamic_cast<CpuHead*>(kernels);
    if (head == nullptr) return errors::FieldError("heads", "be heads of CPU backends", "another one");
    const Replica replica = head->params().replica();
    if (replica.index != static_cast<int>(parts.size()) || replica.count != static_cast<int>(heads.size())) {
      return errors::FieldError(absl::StrCat("heads[", parts.size(), "]"),
                                absl::StrCat("be replica ", parts.size(), " of ", heads.size()),
                                absl::StrCat("replica ", replica.index, " of ", replica.count));
    }
    if (!(head->config() == heads.front()->config())) {
      return errors::FieldError(absl::StrCat("heads[", parts.size(), "].config"), "be that of the first",
                                "another one");
    }
    parts.push_back(head);
  }
  return parts;
}

namespace {

// The replicas that have the same classes.
class CpuReplicas final : public Replicas {
 public:
  explicit CpuReplicas(std::vector<CpuParams*> replicas) : replicas_(std::move(replicas)) {}

  absl::Status SumGradients() override {
    for (Param param : kTrainedParams) {
      for (CpuParams* owner : replicas_) SumShard(param, *owner);
    }
    return absl::OkStatus();
  }

  absl::Status SpreadValues() override {
    for (Param param : kTrainedParams) {
      for (CpuParams* owner : replicas_) SpreadShard(param, *owner);
    }
    return absl::OkStatus();
  }

 private:
  // The elements of the owner's shard among those that each of the replicas keeps of a parameter.
  struct Range {
    int64_t first;
    int64_t elements;
  };
  static Range RangeOf(Param param, const CpuParams& owner) {
    const ShardRows rows = ShardRowsOf(owner.config(), param, owner.replica());
    const ShardRows kept = StoredRowsOf(owner.config(), {param, Role::kValue}, owner.replica());
    const int64_t cols = ShapeOf(owner.config(), param).cols;
    return {(rows.first - kept.first) * cols, rows.rows * cols};
  }

  void SumShard(Param param, CpuParams& owner) {
    if (owner.gradient(param) == nullptr) return;
    const auto [first, elements] = RangeOf(param, owner);
    owner.pool().ParallelFor(elements, kElementGrain, [&, first = first](int64_t begin, int64_t end) {
      for (int64_t from = begin; from < end; from += kSumBlock) {
        SumBlock(param, owner, first + from, std::min(kSumBlock, end - from));
      }
    });
  }

  void SumBlock(Param param, const CpuParams& owner, int64_t from, int64_t n) const {
    std::array<float, kSumBlock> sum{};
    for (const CpuParams* replica : replicas_) {
      float* const part = replica->gradient(param) + from;
      for (int64_t i = 0; i < n; ++i) sum[static_cast<size_t>(i)] += part[i];
      std::fill_n(part, n, 0.0f);
    }
    std::copy_n(sum.begin(), n, owner.gradient(param) + from);
  }

  void SpreadShard(Param param, CpuParams& owner) {
    const float* const values = owner.value(param);
    if (values == nullptr) return;
    const auto [first, elements] = RangeOf(param, owner);
    for (CpuParams* replica : replicas_) {
      if (replica == &owner) continue;
      owner.pool().ParallelFor(elements, kElementGrain, [&, first = first](int64_t begin, int64_t end) {
        std::memcpy(replica->value(param) + first + begin, values + first + begin,
                    static_cast<size_t>(end - begin) * sizeof(float));
      });
    }
  }

  const std::vector<CpuParams*> replicas_;
};

// The replicas of a head that is split by vocabulary, one place after the other.
class CpuGrid final : public Replicas {
 public:
  explicit CpuGrid(std::vector<CpuReplicas> places) : places_(std::move(places)) {}

  absl::Status SumGradients() override {
    for (CpuReplicas& place : places_) {
      if (absl::Status status = place.SumGradients(); !status.ok()) return status;
    }
    return absl::OkStatus();
  }
  absl::Status SpreadValues() override {
    for (CpuReplicas& place : places_) {
      if (absl::Status status = place.SpreadValues(); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

 private:
  std::vector<CpuReplicas> places_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Replicas>> MakeCpuReplicas(absl::Span<HeadKernels* const> heads) {
  absl::StatusOr<std::vector<CpuHead*>> parts = CpuPartsOf(heads);
  if (!parts.ok()) return parts.status();
  const auto places = static_cast<size_t>(PlacesOf(heads.front()->config(), static_cast<int>(parts->size())));
  std::vector<std::vector<CpuParams*>> replicas(places);
  for (size_t i = 0; i < parts->size(); ++i) replicas[i % places].push_back(&(*parts)[i]->params());
  std::vector<CpuReplicas> all;
  for (std::vector<CpuParams*>& of_place : replicas) all.emplace_back(std::move(of_place));
  return std::make_unique<CpuGrid>(std::move(all));
}

absl::Status JoinCpuClasses(absl::Span<HeadKernels* const> heads) {
  return JoinTimedCpuClasses(heads, std::make_shared<MemberExchanges>(static_cast<int>(heads.size())));
}

absl::Status JoinTimedCpuClasses(absl::Span<HeadKernels* const> heads,
                                 const std::shared_ptr<MemberExchanges>& clocks) {
  absl::StatusOr<std::vector<CpuHead*>> parts = CpuPartsOf(heads);
  if (!parts.ok()) return parts.status();
  for (CpuHead* head : *parts) {
    if (head->config().split != Split::kVocabulary) {
      return errors::FieldError("split", "be vocabulary", Name(head->config().split));
    }
  }
  const int heads_of_all = static_cast<int>(parts->size());
  const int places = PlacesOf(parts->front()->config(), heads_of_all);
  for (int first = 0; first < heads_of_all; first += places) {
    const auto exchange =
        std::make_shared<TimedExchange>(std::make_unique<ThreadExchange>(places), clocks, first);
    for (int i = 0; i < places; ++i) (*parts)[static_cast<size_t>(first + i)]->Join(exchange);
  }
  return absl::OkStatus();
}

}  // namespace lossd::kernels
