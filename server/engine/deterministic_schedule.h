// SPDX-License-Identifier: Apache-2.0
// DeterministicSchedule is the schedule of a trainable head in deterministic mode: it accumulates rows in a
// fixed order, so the same microbatches give the same bits in any order of arrival.
//
// The file declares its parts from the bottom up. A GroupAssembly collects the rows of one group.
// GroupDecisions remembers how the groups of the step were computed. A Sequencer decides which group comes
// next. GroupAreas is the memory of the groups. DeterministicSchedule puts them together; a session
// (head_session.h) uses only this class.
//
// The engine's lock guards all of it, as in schedule.h.
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

// Names a group: rows [group * group_rows, (group + 1) * group_rows) of a microbatch, or up to its last row.
// Groups accumulate in the order of their keys.
struct GroupKey {
  uint64_t microbatch_id = 0;
  int64_t group = 0;
  friend auto operator<=>(const GroupKey&, const GroupKey&) = default;
};

// One group of rows, from its first slice until it goes to the device.
//
// A group is a fixed range of rows of one microbatch and is computed as one chunk. It has an area of memory
// with a place for each of its rows. The group lends a slice the places of its rows (Lend), the slice is
// copied there, and then it is part of the group (Attach). Slices may overlap, if two calls send the same
// rows: each row is computed once, for all slices that hold it.
//
// Plain state; the engine's lock guards it. Not movable, because others keep references to it.
class GroupAssembly {
 public:
  // A run of rows that the same slices hold. Without slices it is a gap: no slice brought these rows.
  struct Segment {
    RowRange rows;
    std::vector<SliceWork*> slices;  // in order of arrival
  };

  // `area`: the index of the area in which the group assembles.
  GroupAssembly(GroupKey key, RowRange rows, size_t area, const Ledger& ledger);
  GroupAssembly(const GroupAssembly&) = delete;
  GroupAssembly& operator=(const GroupAssembly&) = delete;

  GroupKey key() const { return key_; }
  RowRange rows() const { return rows_; }
  size_t area() const { return area_; }

  // ---- Places of rows ----
  // True if the places of these rows may be lent: no place is on loan, and the group has use for the slice.
  // Places of rows that are here already are lent again only while other rows of the group are missing, which
  // the slice may bring. So the loans of a group come to an end, however often its rows are sent.
  bool IsFree(RowRange rows) const;
  // Lends the places of free rows to a stream; `loan` names the loan.
  void Lend(uint64_t loan, const StreamState* stream, RowRange rows);
  // Ends a loan. True if the slice that it was made for was never attached.
  bool Return(uint64_t loan);

  // ---- Slices ----
  // Adds a slice whose hidden states have been copied to the places that were lent for it. False, and nothing
  // is done, if none were lent.
  bool Attach(std::unique_ptr<SliceWork>& slice, uint64_t arrival);
  // Moves the slices of failed streams to `taken`.
  void TakeFailed(std::vector<std::unique_ptr<SliceWork>>& taken);
  const std::vector<std::unique_ptr<SliceWork>>& slices() const { return slices_; }
  // Removes all slices, in order of arrival.
  std::vector<std::unique_ptr<SliceWork>> TakeSlices() { return std::exchange(slices_, {}); }
  // The `arrival` numbers of the first and of the last slice.
  uint64_t first_arrival() const { return first_arrival_; }
  uint64_t last_arrival() const { return last_arrival_; }
  // All rows of the group, ascending, cut wherever a slice begins or ends.
  std::vector<Segment> Segments() const;

  // ---- Completeness ----
  // Reads the ledger again, after rows of the microbatch were declared or withdrawn.
  void Refresh(const Ledger& ledger);
  // True if every row that is not settled is here and no place is on loan.
  bool IsComplete() const { return missing_ == 0 && lent_.empty(); }
  // True if no place is on loan.
  bool IsQuiet() const { return lent_.empty(); }
  // True if none of the group's rows remains to be accumulated: each was accumulated, or has no target.
  bool IsSettled() const { return needed_rows_ == 0; }
  // The first run of rows that are missing; empty if none is.
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
  std::vector<uint8_t> needed_;    // [rows], 1: the row is not settled, or not declared yet
  std::vector<int32_t> coverage_;  // [rows], how many slices hold the row
  int64_t needed_rows_ = 0;
  int64_t missing_ = 0;  // rows that are needed and that no slice holds
  std::vector<Lent> lent_;
  std::vector<std::unique_ptr<SliceWork>> slices_;
  uint64_t first_arrival_ = 0;
  uint64_t last_arrival_ = 0;
};

// GroupDecisions remembers how the groups of a step were computed, so that a repeat of some of their rows is
// computed in the same way.
//
// With automatic gradients, a chunk decides from its rows how its gradients are computed
// (kernels/decision.h). A repeat that brings only some rows of a group could decide otherwise than the whole
// group did, and so give other bits.
//
// Plain state without locks; the engine's lock guards it.
class GroupDecisions {
 public:
  // The most groups that are remembered, about 4 MiB. Repeats of other groups decide by the rows that they
  // bring.
  static constexpr size_t kMostGroups = size_t{1} << 16;

  // Notes the decision of `chunk`, in which the whole group was computed to be accumulated.
  void Note(GroupKey group, const kernels::Chunk& chunk);
  // Options for a part of the group: the options asked for, with what the whole group decided.
  kernels::LossOptions For(GroupKey group, const kernels::LossOptions& asked) const;
  // Forgets everything; called when the step is over.
  void Clear() { decided_.clear(); }

 private:
  struct Decided {
    kernels::Gradients gradients = kernels::Gradients::kExact;
    float sample_threshold = 0.0f;
  };
  std::map<GroupKey, Decided> decided_;  // only groups that were not computed as asked for
};

// Sequencer decides in which order the rows of one head are accumulated, and which slice may be received
// next.
//
// The rows of a microbatch are cut into groups on a fixed grid. A group is one chunk, so which rows are
// computed together depends on the microbatch alone. Groups accumulate in the order of (microbatch id,
// group), where the ids of a step are 0, 1, 2, ..., so sums are formed in the same order in any order of
// arrival. One group has its *turn*: it assembles until all of its rows are here, and goes to the device when
// the group before it has good results. A slice of a later group waits, unread, until the turn of its group.
// Rows of a group that has been accumulated are *repeats*: they need no turn and are computed again in their
// old places, with zeros in the places of the rows that were not sent again.
//
// A contribution (ledger.h) shares these ids with the microbatches. It has its turn until all of its rows are
// added.
//
// Memory: a fixed number of areas, each with places for the rows of one group. One area is always left to the
// group whose turn it is. The other areas come free without any further message from a client, so no deadlock
// is possible.
//
// Failure. A group that fails keeps its turn. Rows of it that are settled stay settled.
//
// Plain state without threads; the engine's lock guards it.
class Sequencer {
 public:
  // The number of areas, the fewest that suffice: one group assembles, another one is computed, and a third
  // one, whose turn was taken back, keeps its rows.
  static constexpr size_t kAreas = 3;

  // A slice that may be received now, and the place that is lent to it.
  struct Grant {
    std::unique_ptr<SliceWork> slice;
    size_t area = 0;
    RowRange rows;  // rows of the slice, counted from the start of the area
    uint64_t loan = 0;
  };

  // The ledgers outlive the sequencer.
  Sequencer(int64_t group_rows, const Ledger* ledger, const ContributionLedger* contributions);

  int64_t group_rows() const { return group_rows_; }
  GroupKey turn() const { return turn_; }
  // Returns which of the rows may be withdrawn from the ledger: rows of groups that have not had their turn
  // yet, or that will have it again because the turn went back. Rows of a group stay if the turn has passed
  // it and it has nothing left to accumulate, even when the turn has gone back since. Otherwise slices of
  // that group would keep an area until its turn comes, and groups before it need the area.
  std::vector<RowRange> Withdrawable(uint64_t microbatch_id, RowRange rows) const;

  // ---- Slices ----
  // Asks for memory for a slice. TakeGrants grants it.
  void Request(std::unique_ptr<SliceWork> slice);
  // Lends memory to the slices whose groups may take them now, first come first served.
  std::vector<Grant> TakeGrants();
  // Adds a slice to its group, after its rows were copied to the memory lent to it. False, and nothing is
  // done, if it was lent none.
  bool Attach(std::unique_ptr<SliceWork>& slice, uint64_t arrival);
  // Ends a loan, whether or not the slice was attached.
  void Return(size_t area, uint64_t loan);
  // Removes the slices of failed streams.
  DroppedSlices TakeFailed();

  // ---- Changes of the ledger ----
  // Rows of a microbatch were declared or withdrawn.
  void OnDeclared(uint64_t microbatch_id);
  // A contribution was declared, or rows of it were added.
  void OnContribution() { Advance(); }
  // Forgets everything, for a new step. Before the call, all streams have failed, and no group that had its
  // turn is on the device.
  void Clear();

  // ---- The device ----
  // True if a group can be computed whose slices all have arrival numbers below `before`.
  bool HasReady(uint64_t before = std::numeric_limits<uint64_t>::max()) const;
  // The next group to compute: of the groups that are ready, the one whose first slice arrived first, so that
  // later groups cannot hold it up. Null if none is ready.
  std::unique_ptr<GroupAssembly> TakeReady();
  // All rows of the group have good results, so the next group may follow.
  void OnResultsGood(const GroupAssembly& group);
  // The backend no longer uses the group's memory.
  void ReleaseArea(const GroupAssembly& group);
  // The group has left the device, and the ledger knows which rows are settled.
  void OnLeft(const GroupAssembly& group);

  // ---- For people ----
  // What accumulation waits for, e.g. "microbatch 3, rows [0, 128)"; empty if no slice is waiting.
  std::string WaitsFor() const;
  // True if the stream has a slice that waits for memory or for other rows of its group.
  bool IsWaiting(const StreamState& stream) const;
  int64_t waiting_slices() const { return static_cast<int64_t>(waiting_.size()); }
  int64_t attached_slices() const;

 private:
  struct Area {
    bool taken = false;  // a group assembles in it or is computed in it
    int64_t loans = 0;   // loans that have not ended
    bool free() const { return !taken && loans == 0; }
  };

  GroupKey KeyOf(uint64_t microbatch_id, RowRange rows) const {
    return {microbatch_id, rows.begin / group_rows_};
  }
  RowRange RowsOf(GroupKey key) const;
  // The assembly of this group, opened if that is allowed now. Null: the group may not take slices now.
  GroupAssembly* AssemblyFor(GroupKey key);
  // True if the group accumulates nothing and so needs no turn: the turn has passed it, or all its rows are
  // settled.
  bool IsRepeat(const GroupAssembly& group) const { return group.key() < turn_ || group.IsSettled(); }
  // True if the group can be computed as soon as the device has time.
  bool IsReady(const GroupAssembly& group) const;
  // Closes groups that have neither slices nor loans, so that their areas are free for other groups.
  void CloseIdle();
  // Moves the turn on while the group or contribution that has it needs nothing more.
  void Advance();
  // The group that has the next turn; nothing if the present turn is not over.
  std::optional<GroupKey> AfterTurn() const;

  const int64_t group_rows_;
  const Ledger* const ledger_;
  const ContributionLedger* const contributions_;
  GroupKey turn_;
  GroupKey furthest_;  // the furthest group that has had its turn in this step
  std::map<GroupKey, std::unique_ptr<GroupAssembly>> open_;
  std::map<GroupKey, bool> on_device_;  // groups that accumulate, on the device; true: results are good
  Area areas_[kAreas];
  std::vector<std::unique_ptr<SliceWork>> waiting_;
  uint64_t last_loan_ = 0;
};

// Memory for the groups of one head: Sequencer::kAreas areas of the same size.
struct GroupAreas {
  std::shared_ptr<kernels::StagingMemory> memory;
  int64_t group_rows = 0;
  int64_t area_bytes = 0;

  // The rows of a group: as many as `max_bytes` for all areas allow, but at most `slice_rows`.
  static int64_t GroupRows(int64_t hidden_size, int64_t slice_rows, int64_t max_bytes);
  // Allocates the areas for groups of GroupRows rows. Called without the engine's lock.
  static absl::StatusOr<GroupAreas> Allocate(kernels::Backend* backend, int64_t hidden_size,
                                             int64_t slice_rows, int64_t max_bytes);
  uint8_t* At(size_t area) const { return memory->bytes().data() + static_cast<int64_t>(area) * area_bytes; }
};

// The schedule of a trainable head in deterministic mode. Rows that accumulate are computed in the order of a
// Sequencer: group by group, each group a chunk in an area of memory that holds the whole group. Operations,
// and rows that do not accumulate, are run by arrival, in an ArrivalSchedule inside this one. Groups and
// other chunks alternate. An operation runs after all groups that were complete before it.
//
// Threads and locks as in Schedule. Held by a shared pointer, because buffers of slices may outlive the head:
// they keep a weak pointer, by which they see that the schedule is gone.
class DeterministicSchedule final : public Schedule,
                                    public std::enable_shared_from_this<DeterministicSchedule> {
 public:
  // The context outlives the schedule. `limits` and `chunk_rows` are for streams that come by arrival.
  DeterministicSchedule(EngineContext* context, GroupAreas areas, SliceLimits limits, int64_t chunk_rows,
                        std::shared_ptr<OpenStep> step, MemoryReady memory_ready,
                        WorkQueue::ValuesOf values = nullptr);

  Schedule& For(bool accumulates) override {
    if (accumulates) return *this;
    return arrival_;
  }
  SliceLimits limits() const override { return limits_; }
  // Does not change the groups of rows, so that a run repeats bit for bit.
  absl::Status SetLimits(const SliceLimits& limits, int64_t chunk_rows) override;
  bool FindMemory(std::unique_ptr<SliceWork>& slice) override;
  void Queue(std::unique_ptr<SliceWork> slice) override;

  DroppedSlices TakeFailed() override;
  void Push(Operation* operation) override;
  std::vector<Operation*> TakeOperations() override { return arrival_.TakeOperations(); }
  int64_t operations() const override { return arrival_.operations(); }
  ScheduledWork TakeNext(const DeviceLoad& load, bool head_is_idle) override;
  Backlog backlog() const override;

  // ---- Changes of the open step ----
  // Rows of a microbatch were declared in the ledger, or withdrawn.
  void OnDeclared(uint64_t microbatch_id);
  // Returns which of the rows may be withdrawn from the ledger (Sequencer::Withdrawable).
  std::vector<RowRange> Withdrawable(uint64_t microbatch_id, RowRange rows) const {
    return sequencer_.Withdrawable(microbatch_id, rows);
  }
  // A contribution was declared, or rows of it were added.
  void OnContribution();
  // The gradients begin at zero. Before the call, all streams that accumulate have failed, and the ledgers
  // are empty.
  void OnRestart();

  // ---- Turns ----
  // True if the stream has a slice that waits for other slices.
  bool IsWaiting(const StreamState& stream) const { return sequencer_.IsWaiting(stream); }
  // True if rows of the contribution may be added: its turn has come, or is over.
  bool HasTurn(uint64_t contribution_id) const;
  // False if the contribution has its turn already. Otherwise `ready` will be called once, without the lock,
  // when the turn comes, after OnRestart, or after EndTurns.
  bool AwaitTurn(uint64_t contribution_id, uint64_t ticket, absl::AnyInvocable<void()> ready);
  // Drops the wait of that ticket. True if this keeps its `ready` from being called.
  bool ForgetTurn(uint64_t ticket);
  // Ends all waits, because no more turns will come.
  void EndTurns() { CallTurns(/*all=*/true); }

  // ---- Calls from its chunks ----
  // Options for a chunk that has only some rows of its group; the whole group may have been computed before
  // (GroupDecisions).
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
  // Called when the turn may have moved or memory may have come free. Finds memory for the slices that wait,
  // and calls back the contributions whose turn has come. True if `own`, which may be null, is among the
  // slices: it is then returned in `own_slice` instead of being given to MemoryReady.
  bool Advance(const SliceWork* own, std::unique_ptr<SliceWork>* own_slice);
  void Advance() { Advance(nullptr, nullptr); }
  StagingBuffer BufferFor(const Sequencer::Grant& grant);
  void CallTurns(bool all);

  EngineContext* const context_;
  const GroupAreas areas_;
  const SliceLimits limits_;
  const std::shared_ptr<OpenStep> step_;  // shared, because a buffer may come back after the session's end
  const MemoryReady memory_ready_;
  Sequencer sequencer_;
  GroupDecisions decisions_;
  ArrivalSchedule arrival_;
  std::vector<TurnWaiter> turn_waiters_;
  uint64_t arrivals_ = 0;        // attached slices and operations so far
  bool group_was_last_ = false;  // so that groups and other chunks alternate
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DETERMINISTIC_SCHEDULE_H_
