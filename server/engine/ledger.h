// SPDX-License-Identifier: Apache-2.0
// What has been accumulated in the open step of one head, row by row, so that nothing is counted twice.
//
// Rows are kept themselves, not hashes (microbatch_record.h): the same id with other contents is always
// noticed. What ends without accumulating anything is withdrawn again, and leaves no trace.
//
// Memory: that of the records; at most max_rows rows of max_microbatches microbatches, and what RowMemory
// has. Thread-compatible: guarded by the engine's lock.
#ifndef LOSSD_SERVER_ENGINE_LEDGER_H_
#define LOSSD_SERVER_ENGINE_LEDGER_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/engine/microbatch_record.h"
#include "server/engine/row_memory.h"
#include "server/engine/stream.h"

namespace lossd::engine {

class Ledger {
 public:
  // `memory` pays for the ledger, until Clear.
  Ledger(int64_t max_rows, int64_t max_microbatches, RowMemory::Account memory = {})
      : max_rows_(max_rows), max_microbatches_(max_microbatches), memory_(std::move(memory)) {}

  // Declares rows of a microbatch, in time proportional to the rows. Ignored rows settle at once.
  // FAILED_PRECONDITION if the id is known with other terms or contents; RESOURCE_EXHAUSTED if the ledger
  // would exceed its limits; then nothing has changed.
  absl::Status Declare(uint64_t id, const MicrobatchTerms& terms, RowRange rows, const RowContents& contents);

  // The stream that declared the rows has ended well: they stay, those without a target too.
  void Keep(uint64_t id, RowRange rows);
  // The stream that declared the rows has ended otherwise: of the rows, those are forgotten that are pending,
  // or have no target and were not kept. Short runs of them between others stay, so that the ledger does not
  // fall to pieces. `forget_empty`: so is the microbatch if no row is left and nothing of it was kept.
  void Withdraw(uint64_t id, RowRange rows, bool forget_empty);

  bool Contains(uint64_t id) const { return microbatches_.contains(id); }
  // N of a microbatch; nothing if the id is not known.
  std::optional<int64_t> MicrobatchRows(uint64_t id) const;
  // How many of the rows, declared or not, are not settled.
  int64_t CountUnsettled(uint64_t id, RowRange rows) const;
  // mask[i] becomes 1 if row rows.begin + i, declared or not, is not settled, else 0.
  void MarkUnsettled(uint64_t id, RowRange rows, absl::Span<uint8_t> mask) const;

  // The members below take rows that have been declared.

  // What the rows were declared with; kernels::kIgnoredTarget for those that were not. Floats that none of
  // the rows has are empty.
  RowValues Contents(uint64_t id, RowRange rows) const;

  // True if any of the rows is reserved.
  bool AnyReserved(uint64_t id, RowRange rows) const;

  // Reserves the pending rows. mask[i] becomes 1 for each valid row reserved now, else 0. Returns the
  // number of valid rows among them that were settled before (repeats).
  int64_t Reserve(uint64_t id, RowRange rows, absl::Span<uint8_t> mask);
  // Settles the reserved rows; returns how many valid rows that are.
  int64_t Commit(uint64_t id, RowRange rows);
  // Makes the reserved rows pending again.
  void Release(uint64_t id, RowRange rows);

  // One line for each microbatch of `ids`, ascending, that is not settled in full, e.g. "microbatch 7: rows
  // [128, 256) of 1024", "microbatch 9: never opened". At most `max_lines`, then a line with the rest's
  // count.
  std::vector<std::string> Missing(absl::Span<const uint64_t> ids, int max_lines = 20) const;

  // One line for each microbatch that is not among `ids`, ascending, and of which some rows were accumulated
  // and others not: to leave it so would count half of it. At most `max_lines`.
  std::vector<std::string> Incomplete(absl::Span<const uint64_t> ids, int max_lines = 20) const;

  // The microbatches that are settled in full, ascending.
  std::vector<uint64_t> CompleteIds() const;

  // Forgets everything (a new step). No row may be reserved.
  void Clear();

  int64_t microbatches() const { return static_cast<int64_t>(microbatches_.size()); }
  // Of those, the ones that are part of the sum: rows were accumulated, or none has to be.
  int64_t begun_microbatches() const { return begun_; }
  int64_t accumulated_rows() const { return accumulated_rows_; }  // valid rows settled
  int64_t declared_rows() const { return declared_rows_; }
  int64_t bytes() const { return bytes_; }

 private:
  // Counts what is known of a microbatch, or no longer does.
  void Count(const MicrobatchRecord& record);
  void Uncount(const MicrobatchRecord& record);
  // Runs `change`, which may change the record, and keeps the counters.
  template <typename Change>
  void Update(MicrobatchRecord& record, Change change);
  // RESOURCE_EXHAUSTED if so many rows more, of a microbatch that is new or not, are too many.
  absl::Status CheckLimits(uint64_t id, bool is_new, int64_t rows) const;

  const int64_t max_rows_;
  const int64_t max_microbatches_;
  RowMemory::Account memory_;
  std::map<uint64_t, MicrobatchRecord> microbatches_;
  // Over all microbatches.
  int64_t begun_ = 0;
  int64_t half_done_ = 0;
  int64_t accumulated_rows_ = 0;
  int64_t declared_rows_ = 0;
  int64_t bytes_ = 0;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_LEDGER_H_
