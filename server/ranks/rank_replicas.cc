// SPDX-License-Identifier: Apache-2.0
#include "server/ranks/rank_replicas.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/field_error.h"
#include "server/ranks/remote_backend.h"

namespace lossd::ranks {
namespace {

class RankReplicas final : public kernels::Replicas {
 public:
  RankReplicas(std::unique_ptr<kernels::Replicas> own, std::vector<RemoteHead*> others,
               absl::Duration timeout)
      : own_(std::move(own)), others_(std::move(others)), timeout_(timeout) {}

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
    // Who waits longer for a rank than a collective may take, waits in vain; so after a failure.
    const absl::Time deadline =
        clocks::SteadyNow() + (status.ok() ? timeout_ + kLastWords : std::min(timeout_, kLastWords));
    absl::Status of_others, silent;
    for (size_t i = 0; i < others_.size(); ++i) {
      absl::Status answer = AnswerOf(*others_[i], requests[i], deadline, status);
      (absl::IsDeadlineExceeded(answer) ? silent : of_others).Update(answer);
    }
    // What a worker says comes first: it is the cause where one is lost, and the leader only waited in vain.
    of_others.Update(status);
    if (of_others.ok() && !silent.ok()) return absl::UnavailableError(silent.message());
    return of_others;
  }

  // A worker that does not answer is given up.
  absl::Status AnswerOf(const RemoteHead& other, uint64_t request, absl::Time deadline,
                        const absl::Status& own) const {
    WorkerStream& worker = other.worker();
    const absl::Status answer = worker.Await(request, deadline).status();
    if (!absl::IsDeadlineExceeded(answer)) return answer;
    const std::string reason = absl::StrCat("rank ", worker.rank(), " (", worker.hello().host(),
                                            ") is lost: it has not done its part of a collective within ",
                                            absl::FormatDuration(timeout_), " (--collective_timeout)");
    worker.GiveUp(absl::UnavailableError(own.ok() ? reason : absl::StrCat(reason, "; ", own.message())));
    return absl::DeadlineExceededError(reason);
  }

  const std::unique_ptr<kernels::Replicas> own_;
  const std::vector<RemoteHead*> others_;
  const absl::Duration timeout_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<kernels::Replicas>> MakeRankReplicas(
    kernels::RankLink* link, absl::Duration timeout, absl::Span<kernels::HeadKernels* const> heads) {
  absl::StatusOr<std::unique_ptr<kernels::Replicas>> own = link->Join(heads.front());
  if (!own.ok()) return own.status();
  std::vector<RemoteHead*> others;
  for (kernels::HeadKernels* head : heads.subspan(1)) {
    auto* const remote = dynamic_cast<RemoteHead*>(head);
    if (remote == nullptr) return absl::InternalError("the head of a worker is none");
    others.push_back(remote);
  }
  return std::make_unique<RankReplicas>(*std::move(own), std::move(others), timeout);
}

absl::Status JoinRankClasses(kernels::RankLink* link, bool same_chunks,
                             absl::Span<kernels::HeadKernels* const> heads) {
  const int64_t rows = heads.front()->chunk_rows();
  for (size_t rank = 1; same_chunks && rank < heads.size(); ++rank) {
    if (heads[rank]->chunk_rows() == rows) continue;
    return errors::FieldError(
        absl::StrCat("rank ", rank, ": rows of a chunk"),
        absl::StrCat("be as many as those of rank 0, ", rows, ": give all ranks the same --workspace_bytes"),
        heads[rank]->chunk_rows());
  }
  return link->JoinClasses(heads.front());
}

}  // namespace lossd::ranks
