// SPDX-License-Identifier: Apache-2.0
// The schedule that computes by arrival: slices wait in one queue, and a chunk takes as many with the same
// options as it holds, from whatever streams (work_queue.h, chunk_policy.h). Memory comes from the staging
// pool.
//
// As Schedule. Not for callers outside the engine.
#ifndef LOSSD_SERVER_ENGINE_ARRIVAL_SCHEDULE_H_
#define LOSSD_SERVER_ENGINE_ARRIVAL_SCHEDULE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "server/engine/ledger.h"
#include "server/engine/schedule.h"
#include "server/engine/staging_pool.h"
#include "server/engine/work_queue.h"

namespace lossd::engine {

class ArrivalSchedule final : public Schedule {
 public:
  // `chunk_rows`: the most rows of a chunk. The pool and the ledger outlive the schedule.
  ArrivalSchedule(SliceLimits limits, int64_t chunk_rows, StagingPool* staging, Ledger* ledger,
                  MemoryReady memory_ready);

  Schedule& For(bool accumulates) override { return *this; }
  SliceLimits limits() const override { return limits_; }
  absl::Status SetLimits(const SliceLimits& limits, int64_t chunk_rows) override {
    limits_ = limits;
    chunk_rows_ = chunk_rows;
    return absl::OkStatus();
  }
  bool FindMemory(std::unique_ptr<SliceWork>& slice) override;
  void Queue(std::unique_ptr<SliceWork> slice) override { queue_.Push(std::move(slice)); }

  DroppedSlices TakeFailed() override { return {.queued = queue_.TakeFailed()}; }
  void Push(Operation* operation) override { queue_.Push(operation); }
  std::vector<Operation*> TakeOperations() override { return queue_.TakeOperations(); }
  int64_t operations() const override { return queue_.operations(); }
  ScheduledWork TakeNext(const DeviceLoad& load, bool head_is_idle) override;
  Backlog backlog() const override {
    return {.queued_slices = queue_.slices(), .queued_rows = queue_.rows()};
  }
  bool IsWaiting(const StreamState& stream) const override { return false; }
  // The operation that TakeNext would return before anything else; null if there is none.
  const Operation* FrontOperation() const { return queue_.FrontOperation(); }

  // Nothing depends on the order of accumulation.
  void OnDeclared(uint64_t microbatch_id) override {}
  std::vector<RowRange> Withdrawable(uint64_t microbatch_id, RowRange rows) const override { return {rows}; }
  void OnContribution() override {}
  void OnRestart() override {}
  bool HasTurn(uint64_t contribution_id) const override { return true; }
  bool AwaitTurn(uint64_t contribution_id, uint64_t ticket, absl::AnyInvocable<void()> ready) override {
    return false;
  }
  bool ForgetTurn(uint64_t ticket) override { return false; }
  void EndTurns() override {}

 private:
  SliceLimits limits_;
  int64_t chunk_rows_;
  StagingPool* const staging_;
  Ledger* const ledger_;
  const MemoryReady memory_ready_;
  WorkQueue queue_{chunk_rows_};
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_ARRIVAL_SCHEDULE_H_
