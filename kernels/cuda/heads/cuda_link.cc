// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/cuda_link.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/device/host_collectives.h"
#include "kernels/cuda/device/nccl.h"
#include "kernels/cuda/device/stream_timer.h"
#include "kernels/cuda/heads/cuda_head.h"
#include "kernels/cuda/heads/head_replicas.h"
#include "kernels/cuda/heads/rank_class_exchange.h"
#include "kernels/errors/field_error.h"

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

}  // namespace lossd::kernels
