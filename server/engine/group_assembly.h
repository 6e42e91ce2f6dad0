// SPDX-License-Identifier: Apache-2.0
// Deterministic mode: one group of rows while it comes together.
//
// A group is a fixed range of rows of one microbatch, computed as one chunk. It has an area of memory with a
// place for each of its rows; a slice is lent the places of its rows, is copied there, and is then part of
// the group. Slices may overlap (the same rows sent by two calls): each row is computed once, for all of
// them.
//
// Plain state without locks; the engine's lock guards it. Not movable: areas and the engine refer to it.
#ifndef LOSSD_SERVER_ENGINE_GROUP_ASSEMBLY_H_
#define LOSSD_SERVER_ENGINE_GROUP_ASSEMBLY_H_

#include <compare>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "server/engine/ledger.h"
#include "server/engine/slice_work.h"
#include "server/engine/stream.h"

namespace lossd::engine {

// Rows [group * group_rows, ...) of a microbatch. Groups accumulate in the order of their keys.
struct GroupKey {
  uint64_t microbatch_id = 0;
  int64_t group = 0;
  friend auto operator<=>(const GroupKey&, const GroupKey&) = default;
};

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

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_GROUP_ASSEMBLY_H_
