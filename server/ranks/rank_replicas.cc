#include "server/ranks/rank_replicas.h"

#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "server/ranks/remote_backend.h"

namespace lossd::ranks {
namespace {

class RankReplicas final : public kernels::Replicas {
 public:
  RankReplicas(std::unique_ptr<kernels::Replicas> own, std::vector<RemoteHead*> others)
      : own_(std::move(own)), others_(std::move(others)) {}

  absl::Status SumGradients() override {
    return Together(&RemoteHead::StartSumGradients, [this] { return own_->SumGradients(); });
  }
  absl::Status SpreadValues() override {
    return Together(&RemoteHead::StartSpreadValues, [this] { return own_->SpreadValues(); });
  }

 private:
  absl::Status Together(uint64_t (RemoteHead::*start)(), absl::FunctionRef<absl::Status()> own) {
    std::vector<uint64_t> requests;
    for (RemoteHead* other : others_) requests.push_back((other->*start)());
    absl::Status status = own();
    absl::Status of_others;
    for (size_t i = 0; i < others_.size(); ++i)
      of_others.Update(others_[i]->worker().Await(requests[i]).status());
    // What a worker says comes first: it is the cause where one is lost, and the leader only waited in vain.
    return of_others.ok() ? status : of_others;
  }

  const std::unique_ptr<kernels::Replicas> own_;
  const std::vector<RemoteHead*> others_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<kernels::Replicas>> MakeRankReplicas(
    kernels::RankLink* link, absl::Span<kernels::HeadKernels* const> heads) {
  absl::StatusOr<std::unique_ptr<kernels::Replicas>> own = link->Join(heads.front());
  if (!own.ok()) return own.status();
  std::vector<RemoteHead*> others;
  for (kernels::HeadKernels* head : heads.subspan(1)) {
    auto* const remote = dynamic_cast<RemoteHead*>(head);
    if (remote == nullptr) return absl::InternalError("the head of a worker is none");
    others.push_back(remote);
  }
  return std::make_unique<RankReplicas>(*std::move(own), std::move(others));
}

}  // namespace lossd::ranks
