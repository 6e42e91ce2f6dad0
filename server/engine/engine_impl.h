// SPDX-License-Identifier: Apache-2.0
// The implementation of Engine: finds the head of a request and hands the request to its session, on the
// caller's thread or as an operation on the device thread. See engine.h for the contract, and head_session.h
// for where the work is done.
#ifndef LOSSD_SERVER_ENGINE_ENGINE_IMPL_H_
#define LOSSD_SERVER_ENGINE_ENGINE_IMPL_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/engine.h"
#include "server/engine/engine_context.h"
#include "server/engine/head_directory.h"
#include "server/engine/head_session.h"

namespace lossd::engine {

class EngineImpl final : public Engine {
 public:
  explicit EngineImpl(std::unique_ptr<EngineContext> context);
  ~EngineImpl() override;

  uint64_t incarnation() const override { return context_->incarnation; }
  EngineStats stats() const override;
  absl::Duration DeviceSilence() const override { return context_->loop.Silence(); }

  absl::Status CreateHead(absl::string_view name, const kernels::HeadConfig& config) override;
  absl::StatusOr<HeadSnapshot> PlanHead(absl::string_view name,
                                        const kernels::HeadConfig& config) const override;
  absl::Status PublishHead(absl::string_view name) override;
  absl::Status DeleteHead(absl::string_view name) override;
  absl::StatusOr<HeadSnapshot> Describe(absl::string_view name) const override;
  std::vector<HeadSnapshot> List() const override;
  absl::Status OnDevice(absl::string_view name,
                        absl::FunctionRef<absl::Status(head::Head&)> operation) override;

  absl::StatusOr<std::unique_ptr<TensorReader>> OpenReader(absl::string_view name) override;
  absl::StatusOr<std::unique_ptr<TensorWriter>> OpenWriter(absl::string_view name) override;

  absl::StatusOr<GradNormResult> GradNorm(absl::string_view name, std::optional<uint64_t> step,
                                          absl::string_view run) override;
  absl::StatusOr<StepResult> ApplyStep(absl::string_view name, const StepRequest& request) override;
  absl::StatusOr<HeadState> ZeroGradients(absl::string_view name, uint64_t step,
                                          absl::string_view run) override;
  absl::StatusOr<HeadState> Reset(absl::string_view name, ResetScope scope) override;
  absl::Status SetShares(absl::string_view name, const std::vector<int32_t>& shares) override;
  absl::Status BeginLoad(absl::string_view name, const head::Progress& progress,
                         const std::optional<head::AppliedStep>& last_step,
                         const head::History& history) override;
  absl::Status EndLoad(absl::string_view name) override;

  absl::StatusOr<Contribution> OpenContribution(const ContributionSpec& spec) override;
  uint64_t AwaitTurn(const Contribution& contribution, absl::AnyInvocable<void()> ready) override;
  bool ForgetTurn(const Contribution& contribution, uint64_t ticket) override;
  absl::StatusOr<AddedRows> AddRows(const Contribution& contribution, RowRange rows,
                                    absl::Span<const uint8_t> values) override;

  absl::StatusOr<std::unique_ptr<Stream>> Open(StreamSpec spec,
                                               std::shared_ptr<StreamObserver> observer) override;
  absl::StatusOr<std::unique_ptr<Stream>> OpenBackward(BackwardSpec spec,
                                                       std::shared_ptr<StreamObserver> observer) override;
  absl::StatusOr<ReleaseResult> Release(absl::string_view name, uint64_t microbatch_id,
                                        const Asker& asker) override;
  int64_t ExpireRetained(absl::Time limit) override;

 private:
  using SessionPtr = HeadDirectory::SessionPtr;

  // As HeadSession::Run.
  absl::Status RunOnHead(absl::string_view name, absl::FunctionRef<absl::Status(HeadSession&)> operation)
      ABSL_LOCKS_EXCLUDED(context_->mutex);

  const std::unique_ptr<EngineContext> context_;
  HeadDirectory heads_ ABSL_GUARDED_BY(context_->mutex);
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_ENGINE_IMPL_H_
