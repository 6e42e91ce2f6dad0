// SPDX-License-Identifier: Apache-2.0
// The ledgers of one head's open step. They record which rows have been accumulated, so that no row counts
// twice. Ledger records the rows of microbatches, with a MicrobatchRecord for each microbatch.
// ContributionLedger records the rows of contributions, which are gradients from other stages (AddGradient).
// StepLedgers has both ledgers. Contribution is an open call that brings such a gradient.
//
// Thread-compatible: the engine's lock guards all of it, unless a type or function says otherwise. Limits on
// rows and ids, and RowMemory (staging.h), bound the memory. When a ledger refuses a call, it has changed
// nothing.
#ifndef LOSSD_SERVER_ENGINE_LEDGER_H_
#define LOSSD_SERVER_ENGINE_LEDGER_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/head_config.h"
#include "server/engine/staging.h"
#include "server/engine/stream.h"

namespace lossd::engine {

// A depth of a microbatch (lossd.v1.Depth), with its normalizer resolved.
struct DepthTerms {
  int64_t end = 0;  // one past its last row; it begins where the depth before it ends
  float weight = 1.0f;
  double normalizer = 1.0;
  friend bool operator==(const DepthTerms&, const DepthTerms&) = default;
};

// The properties that all streams of one microbatch must agree on.
struct MicrobatchTerms {
  int64_t microbatch_rows = 0;
  kernels::LossOptions options;
  kernels::DType hidden_dtype = kernels::DType::kFloat32;
  Reduction reduction = Reduction::kSum;
  double normalizer = 1.0;  // StreamSpec::normalizer, or the computed one if it is absent
  float grad_output = 1.0f;
  // The three `want` fields are set only for streams whose rows are computed in groups with rows of other
  // streams (deterministic_schedule.h).
  bool want_grad_hidden = false;
  bool want_row_entropy = false;
  bool want_top_classes = false;
  int32_t target_count = 0;        // soft targets of a row
  std::vector<DepthTerms> depths;  // empty: the microbatch is not divided into depths

  // Host memory of the terms in addition to the struct.
  int64_t HostBytes() const { return static_cast<int64_t>(depths.size() * sizeof(DepthTerms)); }
  // The index of the depth of a row; 0 if the microbatch is not divided.
  size_t DepthOf(int64_t row) const;
  // One past the last row of the depth that `row` is in.
  int64_t EndOfDepth(int64_t row) const;
  friend bool operator==(const MicrobatchTerms&, const MicrobatchTerms&) = default;
};

// The contents of some rows that the ledger keeps and compares: what came with them, except hidden states and
// wanted classes. Each field is [rows].
struct RowContents {
  absl::Span<const int32_t> targets;     // classes or kernels::kIgnoredTarget
  absl::Span<const float> row_weights;   // may be empty: 1
  absl::Span<const float> grad_loss;     // may be empty: 1
  absl::Span<const float> grad_lse;      // may be empty: 0
  absl::Span<const float> grad_entropy;  // may be empty: 0
  absl::Span<const float> advantages;    // ObjectiveRows; each of the three may be empty: 0
  absl::Span<const float> old_logprobs;
  absl::Span<const float> ref_logprobs;
  // The digest of soft targets (SoftDigest); empty without soft targets.
  absl::Span<const float> soft_low, soft_high, soft_sums;
};

// SoftDigest is what the ledger keeps of the soft targets of rows, to notice when a row comes again with
// others. `low` and `high` hold 48 bits of a hash of a row's classes and weights: 24 bits each, as a whole
// number. `sums` holds the sum of the row's weights, 0 for an ignored row. Each is [rows], or empty without
// soft targets.
struct SoftDigest {
  std::vector<float> low, high, sums;
};
// Computes the digest. `targets`: as in RowContents.
SoftDigest DigestOf(const SoftTargets& soft, absl::Span<const int32_t> targets);

// The contents of rows, as RowContents, but owning their memory.
struct RowValues {
  std::vector<int32_t> targets;
  std::vector<float> row_weights, grad_loss, grad_lse, grad_entropy;
  ObjectiveRows numbers;
  std::vector<int32_t> classes;  // StreamSpec::classes; not filled by the ledger
  SoftTargets soft;              // not filled by the ledger
  SoftDigest digest;
};

// The record of one microbatch in a Ledger: the contents of its rows and the state of each row.
//
// Rows are declared in pieces: each stream declares its row range with targets and row weights, and a
// backward also with its gradients. Pieces may overlap if their contents agree. A declared row is pending,
// reserved (in a chunk that is being computed) or settled (accumulated, or ignored, so that there is nothing
// to accumulate).
//
// Memory: 5 bytes per declared row, and 4 more for each kind of float that RowContents gives; some hundred
// bytes for the microbatch and for each run of rows; and the memory of the terms
// (MicrobatchTerms::HostBytes). Thread-compatible.
class MicrobatchRecord {
 public:
  // Creates the record of a microbatch with no declared rows.
  explicit MicrobatchRecord(const MicrobatchTerms& terms)
      : terms_(terms), bytes_(kRecordBytes + terms.HostBytes()) {}

  // ---- Declared rows ----
  // The first of the rows that was declared before with other contents; nothing if there is none.
  std::optional<int64_t> FirstDiffering(RowRange rows, const RowContents& contents) const;
  // The parts of the rows that have not been declared.
  std::vector<RowRange> Undeclared(RowRange rows) const;
  // How many bytes Declare would add to bytes().
  static int64_t BytesToDeclare(RowRange piece, const RowContents& contents);
  // Declares `piece`, a range within `rows` that is not declared yet. `contents` are those of `rows`. Ignored
  // rows are settled at once.
  void Declare(RowRange piece, RowRange rows, const RowContents& contents);
  // As Ledger::Keep and Ledger::Withdraw.
  void Keep(RowRange rows);
  void Withdraw(RowRange rows);
  // As Ledger::Contents.
  RowValues Contents(RowRange rows) const;

  // ---- States of rows; each member as in Ledger ----
  int64_t CountUnsettled(RowRange rows) const;
  void MarkUnsettled(RowRange rows, absl::Span<uint8_t> mask) const;
  bool AnyReserved(RowRange rows) const;
  int64_t Reserve(RowRange rows, absl::Span<uint8_t> mask);
  int64_t Commit(RowRange rows);
  void Release(RowRange rows) { ReplaceReserved(rows, kPending); }
  // Text that names the rows that are not settled, e.g. "rows [128, 256) of 1024".
  std::string DescribeMissing() const;

  // ---- Counters and flags ----
  const MicrobatchTerms& terms() const { return terms_; }
  int64_t declared_rows() const { return declared_rows_; }
  int64_t accumulated_rows() const { return accumulated_rows_; }
  int64_t bytes() const { return bytes_; }
  bool kept() const { return kept_; }  // a stream of this microbatch has ended with OK
  bool complete() const { return settled_rows_ == terms_.microbatch_rows; }
  // The microbatch is part of the step: rows were accumulated, or no row needs to be.
  bool begun() const { return accumulated_rows_ > 0 || complete(); }
  bool half_done() const { return accumulated_rows_ > 0 && !complete(); }

 private:
  // kIgnored: the row has no target, so it counts as settled, but no stream that declared it has ended with
  // OK (Keep).
  enum RowState : uint8_t { kPending, kReserved, kSettled, kIgnored };
  static bool IsSettled(uint8_t state) { return state >= kSettled; }

  // Bytes in addition to the rows: a map's node and the heap's blocks, for a record and for a segment.
  static constexpr int64_t kRecordBytes = 256;
  static constexpr int64_t kSegmentBytes = 288;

  // The number of kinds of floats in RowContents. Arrays over the kinds are in the order of its fields.
  static constexpr size_t kFloats = 10;
  static constexpr std::array<float, kFloats> kIfAbsent = {1.0f, 1.0f};  // by kind: two are 1, all others 0
  static std::array<absl::Span<const float>, kFloats> FloatsOf(const RowContents& contents);

  // A contiguous run of declared rows.
  struct Segment {
    std::vector<int32_t> targets;
    std::array<std::vector<float>, kFloats> floats;  // each may be empty
    std::vector<uint8_t> states;

    int64_t rows() const { return static_cast<int64_t>(states.size()); }
    int64_t settled_rows() const;
    int64_t bytes() const;
    // A copy of the rows [first, first + count), by index.
    Segment Part(size_t first, size_t count) const;
    // The runs of rows that stay if the rows [first, last) are withdrawn; each as [begin, end), by index.
    std::vector<std::pair<size_t, size_t>> Staying(size_t first, size_t last) const;
  };

  // Calls fn(segment, index of the first row in the segment, number of rows, first row) for each run of
  // declared rows in `rows`.
  template <typename Record, typename Fn>
  static void ForEachRun(Record& record, RowRange rows, Fn fn);
  // Insert and Remove adjust declared_rows_, settled_rows_ and bytes_.
  void Insert(int64_t first_row, Segment segment);
  Segment Remove(std::map<int64_t, Segment>::iterator it);
  // Changes the state of the reserved rows in `rows`; returns their number.
  int64_t ReplaceReserved(RowRange rows, RowState state);

  MicrobatchTerms terms_;
  std::map<int64_t, Segment> segments_;  // by first row; disjoint
  int64_t declared_rows_ = 0;
  int64_t settled_rows_ = 0;
  int64_t accumulated_rows_ = 0;  // settled rows with a target
  int64_t bytes_;
  bool kept_ = false;
};

// Ledger records, row by row, which rows of microbatches have been accumulated in the open step of one head.
//
// The ledger keeps the contents of rows, not a hash, so it always notices if an id comes again with other
// contents. Only for soft targets it keeps a hash (SoftDigest). When a stream fails, the rows that it has not
// accumulated are withdrawn (Withdraw).
//
// Memory: that of the records. It is bounded by max_rows, max_microbatches and RowMemory. Thread-compatible:
// guarded by the engine's lock.
class Ledger {
 public:
  // `memory` pays for the ledger, until Clear.
  Ledger(int64_t max_rows, int64_t max_microbatches, RowMemory::Account memory = {})
      : max_rows_(max_rows), max_microbatches_(max_microbatches), memory_(std::move(memory)) {}

  // Declares rows of a microbatch, in time proportional to their number. Ignored rows are settled at once.
  // FAILED_PRECONDITION if the id is known with other terms or contents; RESOURCE_EXHAUSTED if the ledger
  // would exceed its limits. After an error nothing has changed.
  absl::Status Declare(uint64_t id, const MicrobatchTerms& terms, RowRange rows, const RowContents& contents);

  // The stream that declared the rows has ended with OK: its rows stay in the ledger, including rows without
  // a target.
  void Keep(uint64_t id, RowRange rows);
  // The stream that declared the rows has failed. In `rows`, the ledger forgets pending rows, and rows
  // without a target for which Keep was not called. A short run of such rows between other rows stays,
  // because one more segment would take more memory. `forget_empty`: the ledger also forgets the microbatch
  // if none of its rows is left and Keep was never called for it.
  void Withdraw(uint64_t id, RowRange rows, bool forget_empty);

  bool Contains(uint64_t id) const { return microbatches_.contains(id); }
  // The number of rows of a microbatch; nothing if the id is not known.
  std::optional<int64_t> MicrobatchRows(uint64_t id) const;
  // How many of the rows, declared or not, are not settled.
  int64_t CountUnsettled(uint64_t id, RowRange rows) const;
  // mask[i] becomes 1 if row rows.begin + i, declared or not, is not settled, else 0.
  void MarkUnsettled(uint64_t id, RowRange rows, absl::Span<uint8_t> mask) const;

  // The members below take rows that have been declared.

  // The contents that the rows were declared with. Only this member also takes undeclared rows: their target
  // is kernels::kIgnoredTarget. Floats that none of the rows has are empty.
  RowValues Contents(uint64_t id, RowRange rows) const;

  // True if any of the rows is reserved.
  bool AnyReserved(uint64_t id, RowRange rows) const;

  // Reserves the pending rows in `rows`. Before the call, none of `rows` may be reserved (AnyReserved).
  // mask[i] becomes 1 if this call reserves row rows.begin + i, else 0. Returns how many of the other rows
  // have a target: these rows are repeats.
  int64_t Reserve(uint64_t id, RowRange rows, absl::Span<uint8_t> mask);
  // Settles the reserved rows in `rows`; returns their number.
  int64_t Commit(uint64_t id, RowRange rows);
  // Makes the reserved rows in `rows` pending again.
  void Release(uint64_t id, RowRange rows);

  // One line for each microbatch of `ids` (ascending) that is not settled in full, e.g. "microbatch 7: rows
  // [128, 256) of 1024", "microbatch 9: never opened". After `max_lines` lines, one line with the number of
  // further microbatches.
  std::vector<std::string> Missing(absl::Span<const uint64_t> ids, int max_lines = 20) const;

  // One line, at most `max_lines`, for each microbatch that is not in `ids` (ascending) and that is half
  // done: some of its rows were accumulated and others not. If the step were closed now, only a part of it
  // would count.
  std::vector<std::string> Incomplete(absl::Span<const uint64_t> ids, int max_lines = 20) const;

  // The microbatches that are settled in full, ascending.
  std::vector<uint64_t> CompleteIds() const;

  // Forgets everything, for a new step. No row may be reserved.
  void Clear();

  int64_t microbatches() const { return static_cast<int64_t>(microbatches_.size()); }
  // How many of the microbatches are part of the step (MicrobatchRecord::begun).
  int64_t begun_microbatches() const { return begun_; }
  int64_t accumulated_rows() const { return accumulated_rows_; }  // valid rows settled
  int64_t declared_rows() const { return declared_rows_; }
  int64_t bytes() const { return bytes_; }

 private:
  // Count adds the counters of the record to the ledger's counters; Uncount subtracts them.
  void Count(const MicrobatchRecord& record);
  void Uncount(const MicrobatchRecord& record);
  // Runs `change`, which may change the record, and adjusts the ledger's counters by the difference.
  template <typename Change>
  void Update(MicrobatchRecord& record, Change change);
  // RESOURCE_EXHAUSTED if the ledger has no room for `rows` more rows, or for one more microbatch (`is_new`).
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

// ---- Contributions ----
// A contribution is a gradient that another stage accumulated for a parameter which it shares with the head
// (tied embeddings).

// Opens a contribution, or a part of it. Fields have the names of lossd.v1.OpenGradient, and errors use these
// names.
struct ContributionSpec {
  std::string head;
  uint64_t step = 0;
  std::optional<uint64_t> generation;  // the HeadState::generation that the call expects
  std::string run;                     // name of the training program's run, for messages
  uint64_t contribution_id = 0;
  kernels::Param param = kernels::Param::kWeight;
  std::optional<RowRange> contribution_rows;  // absent: all rows of the parameter
  std::optional<RowRange> rows;               // rows that this call brings; absent: contribution_rows
  kernels::DType dtype = kernels::DType::kFloat32;
  float scale = 1.0f;
};

// The properties that all calls of one contribution must agree on.
struct ContributionTerms {
  kernels::Param param = kernels::Param::kWeight;
  RowRange rows;  // of the whole contribution
  kernels::DType dtype = kernels::DType::kFloat32;
  float scale = 1.0f;
  friend bool operator==(const ContributionTerms&, const ContributionTerms&) = default;
};

class HeadSession;

// Counts one call in `counter` as long as this object lives. Thread-safe.
class CountedCall {
 public:
  using Counter = std::atomic<int64_t>;

  explicit CountedCall(std::shared_ptr<Counter> counter) : counter_(std::move(counter)) { ++*counter_; }
  ~CountedCall() { --*counter_; }
  CountedCall(const CountedCall&) = delete;
  CountedCall& operator=(const CountedCall&) = delete;

 private:
  const std::shared_ptr<Counter> counter_;
};

// An open AddGradient call; Engine::AddRows takes its rows.
struct Contribution {
  std::shared_ptr<HeadSession> session;  // of the head, even if the head has been deleted since
  HeadState state;                       // state of the head when the call was opened
  Binding binding;                       // to one generation, to which all rows of the call are added
  uint64_t id = 0;
  ContributionTerms terms;
  RowRange rows;     // rows that this call brings
  int64_t cols = 1;  // elements of a row
  std::string run;   // ContributionSpec::run
  // Counts as an open call of the head until all copies are destroyed.
  std::shared_ptr<const CountedCall> counted;

  int64_t row_bytes() const { return cols * static_cast<int64_t>(kernels::SizeOf(terms.dtype)); }
};

// The result of adding the rows of one message.
struct AddedRows {
  int64_t rows = 0;  // rows that had not been added before
  HeadState state;   // state of the head when the rows were added
};

// Checks the values of `rows` of the contribution. OUT_OF_RANGE names the row and column of the first element
// that is not finite, or whose product with the scale is not finite in fp32. Thread-safe.
absl::Status CheckFinite(const Contribution& contribution, RowRange rows, absl::Span<const uint8_t> values);

// Computes a 64-bit checksum, never 0, of each row of `values`. A row has `row_bytes` > 0 bytes. Thread-safe.
std::vector<uint64_t> RowChecksums(absl::Span<const uint8_t> values, int64_t row_bytes);

// ContributionLedger records which rows of contributions have been added in the open step of one head, so
// that none is added twice. It is the counterpart of Ledger for gradients from other stages. It recognizes a
// row by a checksum of its values.
//
// Memory: 8 bytes for each row of each contribution, bounded by max_rows, max_contributions and RowMemory.
// Thread-compatible: guarded by the engine's lock.
class ContributionLedger {
 public:
  // `memory` pays for the ledger, until Clear.
  ContributionLedger(int64_t max_rows, int64_t max_contributions, RowMemory::Account memory = {})
      : max_rows_(max_rows), max_contributions_(max_contributions), memory_(std::move(memory)) {}

  // Enters a contribution. FAILED_PRECONDITION if the id is known with other terms; RESOURCE_EXHAUSTED if the
  // ledger would exceed its limits. After an error nothing has changed.
  absl::Status Declare(uint64_t id, const ContributionTerms& terms);
  // Returns what Declare would return, except for memory; changes nothing.
  absl::Status CheckDeclare(uint64_t id, const ContributionTerms& terms) const;
  bool Contains(uint64_t id) const { return contributions_.contains(id); }

  // The members below take an id that was declared, and rows of that contribution.

  // The runs of rows that have not been added. FAILED_PRECONDITION names the first row that was added before
  // with another checksum. checksums: [rows.size()], none is 0.
  absl::StatusOr<std::vector<RowRange>> Pending(uint64_t id, RowRange rows,
                                                absl::Span<const uint64_t> checksums) const;
  // Records that the rows have been added.
  void Commit(uint64_t id, RowRange rows, absl::Span<const uint64_t> checksums);
  bool Complete(uint64_t id) const;
  // Text that names the missing rows, e.g. "contribution 7: rows [128, 256) of [0, 1024)".
  std::string DescribeMissing(uint64_t id) const;

  // One line, at most `max_lines`, for each contribution that is not in `ids` (ascending) and of which some
  // rows were added and others not.
  std::vector<std::string> Incomplete(absl::Span<const uint64_t> ids, int max_lines = 20) const;
  // The contributions that were added in full, ascending.
  std::vector<uint64_t> CompleteIds() const;

  // Forgets everything, for a new step.
  void Clear();

  int64_t contributions() const { return static_cast<int64_t>(contributions_.size()); }
  // How many of the contributions are part of the step: rows of them were added, or they have no rows.
  int64_t begun_contributions() const;
  int64_t rows() const { return rows_; }
  int64_t bytes() const { return rows_ * kRowBytes + contributions() * kRecordBytes; }

 private:
  static constexpr int64_t kRowBytes = sizeof(uint64_t);
  static constexpr int64_t kRecordBytes = 192;  // a map's node and the heap's blocks

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

// Both ledgers of the open step of one head. A microbatch and a contribution never have the same id in one
// step.
//
// Plain state; the engine's lock guards it.
struct StepLedgers {
  // The limits hold for each of the two ledgers, and `memory` pays for both.
  StepLedgers(int64_t max_rows, int64_t max_microbatches, const RowMemory::Account& memory)
      : microbatches(max_rows, max_microbatches, memory), contributions(max_rows, max_microbatches, memory) {}

  // A line for each of `ids` that is not complete.
  std::vector<std::string> Missing(absl::Span<const uint64_t> ids) const;
  // A line for each microbatch or contribution that is not in `ids`, was begun and is not complete.
  std::vector<std::string> Incomplete(absl::Span<const uint64_t> ids) const;
  // The ids of complete microbatches and contributions, ascending.
  std::vector<uint64_t> CompleteIds() const;
  // Empties both ledgers, which give their memory back.
  void Clear();

  Ledger microbatches;
  ContributionLedger contributions;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_LEDGER_H_
