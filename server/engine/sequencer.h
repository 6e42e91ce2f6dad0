// SPDX-License-Identifier: Apache-2.0
// Deterministic mode: in which order the rows of one head are accumulated, and whose slice may come next.
//
// The rows of a microbatch are cut into groups on a fixed grid; a group is one chunk, so what is computed
// together depends on the microbatch alone. Groups accumulate in the order of (microbatch id, group), ids
// being 0, 1, 2, ... in each step, so sums are formed in the same order whatever arrives first. One group has
// its *turn*: it assembles until all of its rows are here, and goes to the device when the group before it
// has good results. A slice of a later group waits, unread, until its group's turn. Rows of a group that has
// been accumulated are *repeats*: they need no turn, and are computed again in their old places, with rows of
// zeros in place of what was not sent again.
//
// A contribution (contribution.h) has its turn by its id like a microbatch, until all of its rows are added.
//
// Memory: a fixed number of areas, each with places for the rows of one group. One of them is always left to
// the group whose turn it is, and all others come free without anybody sending anything, so nothing waits in
// a circle.
//
// Failure. A group that fails keeps its turn. If its results were not all good, what is settled of it stays.
//
// Plain state without locks or threads; the engine's lock guards it.
#ifndef LOSSD_SERVER_ENGINE_SEQUENCER_H_
#define LOSSD_SERVER_ENGINE_SEQUENCER_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/engine/contribution_ledger.h"
#include "server/engine/group_assembly.h"
#include "server/engine/ledger.h"
#include "server/engine/slice_work.h"
#include "server/engine/stream.h"
#include "server/engine/stream_state.h"

namespace lossd::engine {

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
  // Those of the rows that may leave the ledger: their groups have not had their turn yet, or are to have it
  // again. A group that has nothing to accumulate does not lose what the turn found, also when the turn has
  // gone back since; its slices would keep an area until the turn comes, and others need the area before.
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

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_SEQUENCER_H_
