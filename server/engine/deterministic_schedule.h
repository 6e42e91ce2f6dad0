// SPDX-License-Identifier: Apache-2.0
// The schedule of a trainable head in deterministic mode. Rows that accumulate come in the order of a
// Sequencer: group by group, each group a chunk, in areas of memory that hold a whole group. Everything else,
// operations and rows that do not accumulate, comes by arrival, in an ArrivalSchedule inside this one. Groups
// and other chunks take turns; an operation runs after all groups that were complete before it.
//
// As Schedule. Held by a shared pointer: buffers of slices may outlive the head, and find out that way.
#ifndef LOSSD_SERVER_ENGINE_DETERMINISTIC_SCHEDULE_H_
#define LOSSD_SERVER_ENGINE_DETERMINISTIC_SCHEDULE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/backend.h"
#include "server/engine/arrival_schedule.h"
#include "server/engine/engine_context.h"
#include "server/engine/group_decisions.h"
#include "server/engine/open_step.h"
#include "server/engine/schedule.h"
#include "server/engine/sequencer.h"

namespace lossd::engine {

// Memory for the groups of one head: Sequencer::kAreas areas of the same size.
struct GroupAreas {
  std::shared_ptr<kernels::StagingMemory> memory;
  int64_t group_rows = 0;
  int64_t area_bytes = 0;

  // Rows of a group: as many as `max_bytes` for all areas allow, but at most those of a slice.
  static int64_t GroupRows(int64_t hidden_size, int64_t slice_rows, int64_t max_bytes);
  // As many rows as `max_bytes` for all areas allow, but at most those of a slice. Not for the engine's lock.
  static absl::StatusOr<GroupAreas> Allocate(kernels::Backend* backend, int64_t hidden_size,
                                             int64_t slice_rows, int64_t max_bytes);
  uint8_t* At(size_t area) const { return memory->bytes().data() + static_cast<int64_t>(area) * area_bytes; }
};

class DeterministicSchedule final : public Schedule,
                                    public std::enable_shared_from_this<DeterministicSchedule> {
 public:
  // The context outlives the schedule. `limits` and `chunk_rows` of streams that come by arrival.
  DeterministicSchedule(EngineContext* context, GroupAreas areas, SliceLimits limits, int64_t chunk_rows,
                        std::shared_ptr<OpenStep> step, MemoryReady memory_ready);

  Schedule& For(bool accumulates) override {
    if (accumulates) return *this;
    return arrival_;
  }
  SliceLimits limits() const override { return limits_; }
  // Groups of rows stay as they are, so that a run repeats bit for bit.
  absl::Status SetLimits(const SliceLimits& limits, int64_t chunk_rows) override;
  bool FindMemory(std::unique_ptr<SliceWork>& slice) override;
  void Queue(std::unique_ptr<SliceWork> slice) override;

  DroppedSlices TakeFailed() override;
  void Push(Operation* operation) override;
  std::vector<Operation*> TakeOperations() override { return arrival_.TakeOperations(); }
  int64_t operations() const override { return arrival_.operations(); }
  ScheduledWork TakeNext(const DeviceLoad& load, bool head_is_idle) override;
  Backlog backlog() const override;
  bool IsWaiting(const StreamState& stream) const override { return sequencer_.IsWaiting(stream); }

  void OnDeclared(uint64_t microbatch_id) override;
  // Rows of groups that the turn has passed stay.
  std::vector<RowRange> Withdrawable(uint64_t microbatch_id, RowRange rows) const override {
    return sequencer_.Withdrawable(microbatch_id, rows);
  }
  void OnContribution() override;
  void OnRestart() override;

  bool HasTurn(uint64_t contribution_id) const override;
  bool AwaitTurn(uint64_t contribution_id, uint64_t ticket, absl::AnyInvocable<void()> ready) override;
  bool ForgetTurn(uint64_t ticket) override;
  void EndTurns() override;

  // ---- Of its chunks ----
  // Of a chunk with only some of the rows of a group that may have been computed before.
  kernels::LossOptions OptionsForAPart(const GroupAssembly& group, const kernels::LossOptions& asked) const;
  // A whole group was computed to be accumulated.
  void OnComputed(const GroupAssembly& group, const kernels::Chunk& chunk);
  void OnResults(const GroupAssembly& group, bool all_good);
  void OnLeft(const GroupAssembly& group);

 private:
  // A contribution that waits for its turn.
  struct TurnWaiter {
    uint64_t contribution_id = 0;
    uint64_t ticket = 0;
    absl::AnyInvocable<void()> ready;
  };

  ScheduledWork TakeGroup();
  // The turn may have passed on, or memory have come free: finds memory for the slices that wait, and tells
  // the contributions whose turn it is. True if `own`, which may be null, is among the slices: it is then
  // given back there instead of to MemoryReady.
  bool Advance(const SliceWork* own, std::unique_ptr<SliceWork>* own_slice);
  void Advance() { Advance(nullptr, nullptr); }
  StagingBuffer BufferFor(const Sequencer::Grant& grant);
  void CallTurns(bool all);

  EngineContext* const context_;
  const GroupAreas areas_;
  const SliceLimits limits_;
  const std::shared_ptr<OpenStep> step_;  // shared with the session: a buffer may come back after its end
  const MemoryReady memory_ready_;
  Sequencer sequencer_;
  GroupDecisions decisions_;
  ArrivalSchedule arrival_;
  std::vector<TurnWaiter> turn_waiters_;
  uint64_t arrivals_ = 0;        // slices in order and operations so far
  bool group_was_last_ = false;  // groups and other chunks take turns
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DETERMINISTIC_SCHEDULE_H_
