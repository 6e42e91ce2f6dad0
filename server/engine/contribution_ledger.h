// SPDX-License-Identifier: Apache-2.0
// Which rows of which contributions have been added in the open step of one head, so that none is added
// twice. The counterpart of Ledger for gradients that come from outside; a row is known by a checksum of its
// values.
//
// Memory: 8 bytes for each row of each contribution, at most max_rows rows of
// max_contributions contributions.
// Thread-compatible: guarded by the engine's lock.
#ifndef LOSSD_SERVER_ENGINE_CONTRIBUTION_LEDGER_H_
#define LOSSD_SERVER_ENGINE_CONTRIBUTION_LEDGER_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/engine/contribution.h"
#include "server/engine/row_memory.h"
#include "server/engine/stream.h"

namespace lossd::engine {

class ContributionLedger {
 public:
  // `memory` pays for the ledger, until Clear.
  ContributionLedger(int64_t max_rows, int64_t max_contributions, RowMemory::Account memory = {})
      : max_rows_(max_rows), max_contributions_(max_contributions), memory_(std::move(memory)) {}

  // FAILED_PRECONDITION if the id is known with other terms; RESOURCE_EXHAUSTED if the ledger would exceed
  // its limits; then nothing has changed.
  absl::Status Declare(uint64_t id, const ContributionTerms& terms);
  // What Declare would say, but for memory; changes nothing.
  absl::Status CheckDeclare(uint64_t id, const ContributionTerms& terms) const;
  bool Contains(uint64_t id) const { return contributions_.contains(id); }

  // The members below take an id that was declared and rows of it.

  // The runs of rows that have not been added. FAILED_PRECONDITION naming the first row that was added with
  // another checksum. checksums [rows.size()], none 0.
  absl::StatusOr<std::vector<RowRange>> Pending(uint64_t id, RowRange rows,
                                                absl::Span<const uint64_t> checksums) const;
  // The rows have been added.
  void Commit(uint64_t id, RowRange rows, absl::Span<const uint64_t> checksums);
  bool Complete(uint64_t id) const;
  // E.g. "contribution 7: rows [128, 256) of [0, 1024)".
  std::string DescribeMissing(uint64_t id) const;

  // A line for each contribution outside `ids`, ascending, of which some rows were added and others not.
  std::vector<std::string> Incomplete(absl::Span<const uint64_t> ids, int max_lines = 20) const;
  // Those that were added in full, ascending.
  std::vector<uint64_t> CompleteIds() const;

  // Forgets everything (a new step).
  void Clear();

  int64_t contributions() const { return static_cast<int64_t>(contributions_.size()); }
  // Of those, the ones that are part of the sum: rows were added, or there are none to add.
  int64_t begun_contributions() const;
  int64_t rows() const { return rows_; }
  int64_t bytes() const { return rows_ * kRowBytes + contributions() * kRecordBytes; }

 private:
  static constexpr int64_t kRowBytes = sizeof(uint64_t);
  static constexpr int64_t kRecordBytes = 192;  // of a map's node and the heap's blocks

  struct Record {
    ContributionTerms terms;
    std::vector<uint64_t> checksums;  // [terms.rows.size()]; 0: not added yet
    int64_t added_rows = 0;
    bool complete() const { return added_rows == terms.rows.size(); }
  };

  const int64_t max_rows_;
  const int64_t max_contributions_;
  RowMemory::Account memory_;
  std::map<uint64_t, Record> contributions_;
  int64_t rows_ = 0;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_CONTRIBUTION_LEDGER_H_
