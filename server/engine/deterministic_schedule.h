// SPDX-License-Identifier: Apache-2.0
// The schedule of a trainable head in deterministic mode: it accumulates rows in a fixed order, so that the
// same microbatches give the same bits whatever arrives first.
//
// The file has the parts from the bottom up. A GroupAssembly collects the rows of one group. GroupDecisions
// remembers how the groups of the step were computed. A Sequencer decides which group comes next. GroupAreas
// is the memory of the groups. DeterministicSchedule is the schedule that a session (head_session.h) uses.
//
// All of it is guarded by the engine's lock, as schedule.h says.
#ifndef LOSSD_SERVER_ENGINE_DETERMINISTIC_SCHEDULE_H_
#define LOSSD_SERVER_ENGINE_DETERMINISTIC_SCHEDULE_H_

#include <compare>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "kernels/backend.h"
#include "kernels/head_config.h"
#include "server/engine/engine_context.h"
#include "server/engine/ledger.h"
#include "server/engine/open_step.h"
#include "server/engine/schedule.h"
#include "server/engine/stream.h"
#include "server/engine/stream_state.h"

namespace lossd::engine {

// Rows [group * group_rows, ...) of a microbatch. Groups accumulate in the order of their keys.
struct GroupKey {
  uint64_t microbatch_id = 0;
  int64_t group = 0;
  friend auto operator<=>(const GroupKey&, const GroupKey&) = default;
};

// One group of rows while it comes together.
//
// A group is a fixed range of rows of one microbatch, computed as one chunk. It has an area of memory with a
// place for each of its rows; a slice is lent the places of its rows, is copied there, and is then part of
// the group. Slices may overlap (the same rows sent by two calls): each row is computed once, for all of
// them.
//
// Plain state without locks; the engine's lock guards it. Not movable: areas and the engine refer to it.
class GroupAssembly {
 public:
  // Rows between two neighbouring ends of slices, and the slices that hold them; no slices: a gap.
  struct Segment {
    RowRange rows;
    std::vector<SliceWork*> slices;  // in order of arrival
  };

  // `area` is the caller's name for the area.
  GroupAssembly(GroupKey key, RowRange rows, size_t area, const Ledger& ledger);
  GroupAssembly(const GroupAssembly&) = delete;
  GroupAssembly& operator=(const GroupAssembly&) = delete;

  GroupKey key() const { return key_; }
  RowRange rows() const { return rows_; }
  size_t area() const { return area_; }

  // ---- Places of rows ----
  // True if these rows may be lent: none of them is, and the group has use for them. Rows that are here
  // already are lent again only if others are still missing, which their slice may bring; so the loans of a
  // group come to an end, however often its rows are sent.
  bool IsFree(RowRange rows) const;
  // Lends the places of free rows to a stream; `loan` names the loan.
  void Lend(uint64_t loan, const StreamState* stream, RowRange rows);
  // What was lent came back. True if its slice was never attached.
  bool Return(uint64_t loan);

  // ---- Slices ----
  // Adds a slice whose hidden states are in the places lent for it; false if none were.
  bool Attach(std::unique_ptr<SliceWork>& slice, uint64_t arrival);
  // Removes the slices of failed streams.
  void TakeFailed(std::vector<std::unique_ptr<SliceWork>>& taken);
  const std::vector<std::unique_ptr<SliceWork>>& slices() const { return slices_; }
  // Removes all slices, in order of arrival.
  std::vector<std::unique_ptr<SliceWork>> TakeSlices() { return std::exchange(slices_, {}); }
  // The numbers that came with the first and with the last slice.
  uint64_t first_arrival() const { return first_arrival_; }
  uint64_t last_arrival() const { return last_arrival_; }
  // All rows of the group, ascending, cut wherever a slice begins or ends.
  std::vector<Segment> Segments() const;

  // ---- Completeness ----
  // The ledger has changed: rows were declared.
  void Refresh(const Ledger& ledger);
  // True if every row that is not settled is here and none is lent.
  bool IsComplete() const { return missing_ == 0 && lent_.empty(); }
  bool IsQuiet() const { return lent_.empty(); }
  // True if none of its rows will be accumulated: each was, or has no target.
  bool IsSettled() const { return needed_rows_ == 0; }
  // The first run of rows that have to come and have not; empty if there is none.
  RowRange FirstMissing() const;

 private:
  struct Lent {
    uint64_t loan;
    const StreamState* stream;
    RowRange rows;
  };

  size_t Index(int64_t row) const { return static_cast<size_t>(row - rows_.begin); }
  void Cover(RowRange rows, int delta);

  const GroupKey key_;
  const RowRange rows_;
  const size_t area_;
  std::vector<uint8_t> needed_;    // [rows]: 1: not settled, or not declared yet
  std::vector<int32_t> coverage_;  // [rows]: slices that hold the row
  int64_t needed_rows_ = 0;
  int64_t missing_ = 0;  // rows needed and not covered
  std::vector<Lent> lent_;
  std::vector<std::unique_ptr<SliceWork>> slices_;
  uint64_t first_arrival_ = 0;
  uint64_t last_arrival_ = 0;
};

// How the groups of a step were computed, so that a repeat of some of their rows is computed in the same way.
//
// A group may decide itself how its gradients are computed (kernels/decision.h), by all its rows. A repeat
// that brings only some of the rows could decide otherwise, and give other bits.
//
// Plain state without locks; the engine's lock guards it.
class GroupDecisions {
 public:
  // About 4 MiB. Repeats of groups beyond these decide by the rows that they bring.
  static constexpr size_t kMostGroups = size_t{1} << 16;

  // The whole group was computed as this chunk to be accumulated.
  void Note(GroupKey group, const kernels::Chunk& chunk);
  // Options for a part of the group: those asked for, with what the whole group has decided.
  kernels::LossOptions For(GroupKey group, const kernels::LossOptions& asked) const;
  // The step is over.
  void Clear() { decided_.clear(); }

 private:
  struct Decided {
    kernels::Gradients gradients = kernels::Gradients::kExact;
    float sample_threshold = 0.0f;
  };
  std::map<GroupKey, Decided> decided_;  // of groups that were not computed as asked for
};

// In which order the rows of one head are accumulated, and which slice may come next.
//
// The rows of a microbatch are cut into groups on a fixed grid; a group is one chunk, so what is computed
// together depends on the microbatch alone. Groups accumulate in the order of (microbatch id, group), ids
// being 0, 1, 2, ... in each step, so sums are formed in the same order whatever arrives first. One group has
// its *turn*: it assembles until all of its rows are here, and goes to the device when the group before it
// has good results. A slice of a later group waits, unread, until its group's turn. Rows of a group that has
// been accumulated are *repeats*: they need no turn, and are computed again in their old places, with rows of
// zeros in place of what was not sent again.
//
// A contribution (ledger.h) has its turn by its id like a microbatch, until all of its rows are added.
//
// Memory: a fixed number of areas, each with places for the rows of one group. One of them is always left to
// the group whose turn it is, and all others come free without anybody sending anything, so nothing waits in
// a circle.
//
// Failure. A group that fails keeps its turn. If its results were not all good, what is settled of it stays.
//
// Plain state without locks or threads; the engine's lock guards it.
class Sequencer {
 public:
  // The fewest areas with which a group can assemble while another one is computed and a third one, whose
  // turn was taken back, keeps what it has.
  static constexpr size_t kAreas = 3;

  // A slice that may be received, and where.
  struct Grant {
    std::unique_ptr<SliceWork> slice;
    size_t area = 0;
    RowRange rows;  // of the slice, counted from the start of the area
    uint64_t loan = 0;
  };

  // The ledgers outlive the sequencer.
  Sequencer(int64_t group_rows, const Ledger* ledger, const ContributionLedger* contributions);

  int64_t group_rows() const { return group_rows_; }
  GroupKey turn() const { return turn_; }
  // Returns which of the rows may leave the ledger: their groups have not had their turn yet, or are to have
  // it again. A group that has nothing to accumulate does not lose what the turn found, also when the turn
  // has gone back since; its slices would keep an area until the turn comes, and others need the area before.
  std::vector<RowRange> Withdrawable(uint64_t microbatch_id, RowRange rows) const;

  // ---- Slices ----
  // Asks for the memory of a slice; granted by TakeGrants.
  void Request(std::unique_ptr<SliceWork> slice);
  // Lends memory to the slices whose turn it is, first come first served.
  std::vector<Grant> TakeGrants();
  // The rows of a slice are in the memory lent to it; false, and nothing done, if it was lent none.
  bool Attach(std::unique_ptr<SliceWork>& slice, uint64_t arrival);
  // What was lent came back, used or not.
  void Return(size_t area, uint64_t loan);
  DroppedSlices TakeFailed();

  // ---- The ledger's news ----
  // Rows of a microbatch were declared or withdrawn.
  void OnDeclared(uint64_t microbatch_id);
  // A contribution was declared, or rows of it were added.
  void OnContribution() { Advance(); }
  // A new step: everything is forgotten. No group in turn may be on the device, and all streams have failed.
  void Clear();

  // ---- The device ----
  // True if a group whose slices all arrived before number `before` can be computed.
  bool HasReady(uint64_t before = std::numeric_limits<uint64_t>::max()) const;
  // The next group to compute: of those that are ready, the one whose first slice came first. So new ones,
  // however many, do not hold it up. Null if there is none.
  std::unique_ptr<GroupAssembly> TakeReady();
  // All rows of the group have results, so the next one may follow.
  void OnResultsGood(const GroupAssembly& group);
  // The backend is done with the group's memory.
  void ReleaseArea(const GroupAssembly& group);
  // The group has left the device; the ledger knows what is settled.
  void OnLeft(const GroupAssembly& group);

  // ---- For people ----
  // What accumulation waits for, e.g. "microbatch 3, rows [0, 128)"; empty if no slice is waiting.
  std::string WaitsFor() const;
  // True if the stream waits for memory or for the rest of a group.
  bool IsWaiting(const StreamState& stream) const;
  int64_t waiting_slices() const { return static_cast<int64_t>(waiting_.size()); }
  int64_t attached_slices() const;

 private:
  struct Area {
    bool taken = false;  // by a group that assembles or is on the device
    int64_t loans = 0;   // that have not come back
    bool free() const { return !taken && loans == 0; }
  };

  GroupKey KeyOf(uint64_t microbatch_id, RowRange rows) const {
    return {microbatch_id, rows.begin / group_rows_};
  }
  RowRange RowsOf(GroupKey key) const;
  // The assembly that takes slices of a group now; opens one if it may. Null: not now.
  GroupAssembly* AssemblyFor(GroupKey key);
  // True if the group accumulates nothing and needs no turn: it was passed over, or it had its turn.
  bool IsRepeat(const GroupAssembly& group) const { return group.key() < turn_ || group.IsSettled(); }
  // True if nothing but free time on the device is needed to compute the group.
  bool IsReady(const GroupAssembly& group) const;
  // Closes groups that hold nothing and have lent nothing, so that they keep no area from others.
  void CloseIdle();
  // Lets the turn pass on as long as the group whose turn it is needs nothing.
  void Advance();
  // Whose turn it is next, if the group whose turn it is needs nothing.
  std::optional<GroupKey> AfterTurn() const;

  const int64_t group_rows_;
  const Ledger* const ledger_;
  const ContributionLedger* const contributions_;
  GroupKey turn_;
  GroupKey furthest_;  // that the turn was in this step
  std::map<GroupKey, std::unique_ptr<GroupAssembly>> open_;
  std::map<GroupKey, bool> on_device_;  // in turn, not repeats; true: results are good
  Area areas_[kAreas];
  std::vector<std::unique_ptr<SliceWork>> waiting_;
  uint64_t last_loan_ = 0;
};

// Memory for the groups of one head: Sequencer::kAreas areas of the same size.
struct GroupAreas {
  std::shared_ptr<kernels::StagingMemory> memory;
  int64_t group_rows = 0;
  int64_t area_bytes = 0;

  // Rows of a group: as many as `max_bytes` for all areas allow, but at most those of a slice.
  static int64_t GroupRows(int64_t hidden_size, int64_t slice_rows, int64_t max_bytes);
  // Allocates the areas, with groups of GroupRows rows. To be called without the engine's lock.
  static absl::StatusOr<GroupAreas> Allocate(kernels::Backend* backend, int64_t hidden_size,
                                             int64_t slice_rows, int64_t max_bytes);
  uint8_t* At(size_t area) const { return memory->bytes().data() + static_cast<int64_t>(area) * area_bytes; }
};

// Rows that accumulate come in the order of a Sequencer: group by group, each group a chunk, in areas of
// memory that hold a whole group. Everything else, operations and rows that do not accumulate, comes by
// arrival, in an ArrivalSchedule inside this one. Groups and other chunks take turns; an operation runs after
// all groups that were complete before it.
//
// Threads and locks as in Schedule. Held by a shared pointer: buffers of slices may outlive the head, and see
// by a weak pointer that it is gone.
class DeterministicSchedule final : public Schedule,
                                    public std::enable_shared_from_this<DeterministicSchedule> {
 public:
  // The context outlives the schedule. `limits` and `chunk_rows` of streams that come by arrival.
  DeterministicSchedule(EngineContext* context, GroupAreas areas, SliceLimits limits, int64_t chunk_rows,
                        std::shared_ptr<OpenStep> step, MemoryReady memory_ready,
                        WorkQueue::ValuesOf values = nullptr);

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

  // ---- News of the open step ----
  // Rows of a microbatch were declared in the ledger, or withdrawn.
  void OnDeclared(uint64_t microbatch_id);
  // Returns which of the rows may be withdrawn from the ledger: rows of groups that the turn has passed stay.
  std::vector<RowRange> Withdrawable(uint64_t microbatch_id, RowRange rows) const {
    return sequencer_.Withdrawable(microbatch_id, rows);
  }
  // A contribution was declared, or rows of it were added.
  void OnContribution();
  // The gradients begin at zero: all streams that accumulate have failed, and the ledgers are empty.
  void OnRestart();

  // ---- Turns ----
  // True if the stream has a slice that waits for other slices.
  bool IsWaiting(const StreamState& stream) const { return sequencer_.IsWaiting(stream); }
  // True if rows of the contribution may be added: it is its turn, or that is over.
  bool HasTurn(uint64_t contribution_id) const;
  // False if it has its turn. Else `ready` is called without the lock, once, when it has, after OnRestart, or
  // after EndTurns.
  bool AwaitTurn(uint64_t contribution_id, uint64_t ticket, absl::AnyInvocable<void()> ready);
  // True if the `ready` of that ticket will not be called any more because of this.
  bool ForgetTurn(uint64_t ticket);
  // No turn will come any more.
  void EndTurns() { CallTurns(/*all=*/true); }

  // ---- Of its chunks ----
  // Options for a chunk with only some rows of a group that may have been computed before (GroupDecisions).
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
