// SPDX-License-Identifier: Apache-2.0
// The ledgers of one head's open step: they know which rows have been accumulated, so that no row is counted
// twice. Ledger has the rows of microbatches, a MicrobatchRecord for each; ContributionLedger has the rows of
// contributions, which are gradients from outside (AddGradient); StepLedgers has both. Contribution is an
// open call that brings such a gradient.
//
// Thread-compatible: the engine's lock guards all of it, unless a type or function says otherwise. Limits and
// RowMemory (staging.h) bound the memory. A ledger that refuses something has changed nothing.
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

// A depth of a microbatch, as resolved (lossd.v1.Depth).
struct DepthTerms {
  int64_t end = 0;  // behind its last row; it begins where the one before it ends
  float weight = 1.0f;
  double normalizer = 1.0;
  friend bool operator==(const DepthTerms&, const DepthTerms&) = default;
};

// What all streams of one microbatch must agree on.
struct MicrobatchTerms {
  int64_t microbatch_rows = 0;
  kernels::LossOptions options;
  kernels::DType hidden_dtype = kernels::DType::kFloat32;
  Reduction reduction = Reduction::kSum;
  double normalizer = 1.0;  // as resolved
  float grad_output = 1.0f;
  // Set only for streams whose rows are computed in groups with rows of other streams
  // (deterministic_schedule.h).
  bool want_grad_hidden = false;
  bool want_row_entropy = false;
  bool want_top_classes = false;
  int32_t target_count = 0;        // of soft targets
  std::vector<DepthTerms> depths;  // empty: the microbatch is not divided

  // Host memory that the terms have beside the struct.
  int64_t HostBytes() const { return static_cast<int64_t>(depths.size() * sizeof(DepthTerms)); }
  // The depth of a row; 0 of a microbatch that is not divided.
  size_t DepthOf(int64_t row) const;
  // Behind the last row of the depth of `row`.
  int64_t EndOfDepth(int64_t row) const;
  friend bool operator==(const MicrobatchTerms&, const MicrobatchTerms&) = default;
};

// What is known of some rows besides their hidden states, each [rows].
struct RowContents {
  absl::Span<const int32_t> targets;     // classes or kernels::kIgnoredTarget
  absl::Span<const float> row_weights;   // may be empty: 1
  absl::Span<const float> grad_loss;     // may be empty: 1
  absl::Span<const float> grad_lse;      // may be empty: 0
  absl::Span<const float> grad_entropy;  // may be empty: 0
  absl::Span<const float> advantages;    // may be empty: 0, as may the two below (ObjectiveRows)
  absl::Span<const float> old_logprobs;
  absl::Span<const float> ref_logprobs;
  // What the ledger keeps of soft targets (SoftDigest); may be empty: there are none.
  absl::Span<const float> soft_low, soft_high, soft_sums;
};

// What the ledger keeps of the soft targets of rows, to notice other ones. `low` and `high` hold 48 bits of a
// hash of a row's classes and weights: 24 bits each, as a whole number. `sums` holds the sum of the row's
// weights, 0 for an ignored row. Each is [rows], or empty without soft targets.
struct SoftDigest {
  std::vector<float> low, high, sums;
};
// targets: as in RowContents.
SoftDigest DigestOf(const SoftTargets& soft, absl::Span<const int32_t> targets);

// As RowContents, with memory of its own.
struct RowValues {
  std::vector<int32_t> targets;
  std::vector<float> row_weights, grad_loss, grad_lse, grad_entropy;
  ObjectiveRows numbers;
  std::vector<int32_t> classes;  // StreamSpec::classes, of which the ledger knows nothing
  SoftTargets soft;              // likewise
  SoftDigest digest;
};

// What the ledger knows of the rows of one microbatch.
//
// Rows are declared in pieces (each stream declares its row range with its targets and row weights, or a
// backward with its gradients too); pieces may overlap if they agree. A declared row is pending, reserved (in
// a chunk that is being computed) or settled (accumulated, or ignored and so nothing to accumulate).
//
// Memory: 5 bytes per declared row and 4 for each kind of float that RowContents gives, and some hundred for
// the microbatch and each run of rows, and what the terms have (MicrobatchTerms::HostBytes).
// Thread-compatible.
class MicrobatchRecord {
 public:
  // A microbatch of which no row has been declared.
  explicit MicrobatchRecord(const MicrobatchTerms& terms)
      : terms_(terms), bytes_(kRecordBytes + terms.HostBytes()) {}

  // ---- Declared rows ----
  // The first of the rows that has been declared with other contents; nothing if none has.
  std::optional<int64_t> FirstDiffering(RowRange rows, const RowContents& contents) const;
  // The parts of the rows that have not been declared.
  std::vector<RowRange> Undeclared(RowRange rows) const;
  // By how much Declare would raise bytes().
  static int64_t BytesToDeclare(RowRange piece, const RowContents& contents);
  // Declares `piece`, which is undeclared and within `rows`, with its part of their contents. Ignored rows
  // settle at once.
  void Declare(RowRange piece, RowRange rows, const RowContents& contents);
  // As Ledger::Keep and Withdraw.
  void Keep(RowRange rows);
  void Withdraw(RowRange rows);
  // As Ledger::Contents.
  RowValues Contents(RowRange rows) const;

  // ---- States of rows; each as in Ledger ----
  int64_t CountUnsettled(RowRange rows) const;
  void MarkUnsettled(RowRange rows, absl::Span<uint8_t> mask) const;
  bool AnyReserved(RowRange rows) const;
  int64_t Reserve(RowRange rows, absl::Span<uint8_t> mask);
  int64_t Commit(RowRange rows);
  void Release(RowRange rows) { ReplaceReserved(rows, kPending); }
  // The rows that are not settled, e.g. "rows [128, 256) of 1024".
  std::string DescribeMissing() const;

  // ---- Numbers ----
  const MicrobatchTerms& terms() const { return terms_; }
  int64_t declared_rows() const { return declared_rows_; }
  int64_t accumulated_rows() const { return accumulated_rows_; }
  int64_t bytes() const { return bytes_; }
  bool kept() const { return kept_; }  // a stream of it has ended well
  bool complete() const { return settled_rows_ == terms_.microbatch_rows; }
  // It is part of the sum: rows were accumulated, or none has to be.
  bool begun() const { return accumulated_rows_ > 0 || complete(); }
  bool half_done() const { return accumulated_rows_ > 0 && !complete(); }

 private:
  // kIgnored: the row has no target, so it counts as settled, but Keep has not been called for it.
  enum RowState : uint8_t { kPending, kReserved, kSettled, kIgnored };
  static bool IsSettled(uint8_t state) { return state >= kSettled; }

  // The bytes of a map's node and of the heap's blocks, in addition to the rows.
  static constexpr int64_t kRecordBytes = 256;
  static constexpr int64_t kSegmentBytes = 288;

  // The kinds of floats in RowContents, in its order.
  static constexpr size_t kFloats = 10;
  static constexpr std::array<float, kFloats> kIfAbsent = {1.0f, 1.0f};  // else 0
  static std::array<absl::Span<const float>, kFloats> FloatsOf(const RowContents& contents);

  // A contiguous run of declared rows.
  struct Segment {
    std::vector<int32_t> targets;
    std::array<std::vector<float>, kFloats> floats;  // each may be empty
    std::vector<uint8_t> states;

    int64_t rows() const { return static_cast<int64_t>(states.size()); }
    int64_t settled_rows() const;
    int64_t bytes() const;
    // The part [first, first + count).
    Segment Part(size_t first, size_t count) const;
    // The parts that stay if the rows [first, last) are withdrawn, [begin, end) by index.
    std::vector<std::pair<size_t, size_t>> Staying(size_t first, size_t last) const;
  };

  // Calls fn(segment, first index in segment, number of rows, first row) for each run of declared rows in
  // `rows`.
  template <typename Record, typename Fn>
  static void ForEachRun(Record& record, RowRange rows, Fn fn);
  // Both adjust declared_rows_, settled_rows_ and bytes_.
  void Insert(int64_t first_row, Segment segment);
  Segment Remove(std::map<int64_t, Segment>::iterator it);
  // Gives the reserved ones among the rows another state; returns how many.
  int64_t ReplaceReserved(RowRange rows, RowState state);

  MicrobatchTerms terms_;
  std::map<int64_t, Segment> segments_;  // by first row; disjoint
  int64_t declared_rows_ = 0;
  int64_t settled_rows_ = 0;
  int64_t accumulated_rows_ = 0;  // of the settled ones, those with a target
  int64_t bytes_;
  bool kept_ = false;
};

// What has been accumulated of microbatches in the open step of one head, row by row.
//
// The ledger keeps the contents of rows themselves, so it always notices if an id comes again with other
// contents. Only of soft targets it keeps a hash (SoftDigest). Rows of a stream that ends without having
// accumulated them are withdrawn (Withdraw).
//
// Memory: that of the records; at most max_rows rows of max_microbatches microbatches, and what RowMemory
// has. Thread-compatible: guarded by the engine's lock.
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
  // The stream that declared the rows has not ended well. The ledger forgets those of the rows that are
  // pending, and those without a target that Keep has not kept. A short run of such rows between other rows
  // stays, because one more segment would take more memory. `forget_empty`: the ledger also forgets the
  // microbatch if none of its rows is left and Keep was never called for it.
  void Withdraw(uint64_t id, RowRange rows, bool forget_empty);

  bool Contains(uint64_t id) const { return microbatches_.contains(id); }
  // The number of rows of a microbatch; nothing if the id is not known.
  std::optional<int64_t> MicrobatchRows(uint64_t id) const;
  // How many of the rows, declared or not, are not settled.
  int64_t CountUnsettled(uint64_t id, RowRange rows) const;
  // mask[i] becomes 1 if row rows.begin + i, declared or not, is not settled, else 0.
  void MarkUnsettled(uint64_t id, RowRange rows, absl::Span<uint8_t> mask) const;

  // The members below take rows that have been declared.

  // What the rows were declared with; kernels::kIgnoredTarget for rows that were not declared, which only
  // this member takes. Floats that none of the rows has are empty.
  RowValues Contents(uint64_t id, RowRange rows) const;

  // True if any of the rows is reserved.
  bool AnyReserved(uint64_t id, RowRange rows) const;

  // Reserves those of the rows that are pending. mask[i] becomes 1 if row rows.begin + i is reserved by this
  // call, else 0. Returns how many of the other rows have a target: these rows are repeats. None of the rows
  // is reserved before the call (AnyReserved).
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
  // How many of the microbatches are part of the sum: rows of them were accumulated, or none has to be.
  int64_t begun_microbatches() const { return begun_; }
  int64_t accumulated_rows() const { return accumulated_rows_; }  // valid rows settled
  int64_t declared_rows() const { return declared_rows_; }
  int64_t bytes() const { return bytes_; }

 private:
  // Count adds the numbers of the record to the ledger's counters; Uncount subtracts them.
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

// Opens (part of) a contribution. Field names equal those of lossd.v1.OpenGradient, and errors name them so.
struct ContributionSpec {
  std::string head;
  uint64_t step = 0;
  std::optional<uint64_t> generation;  // HeadState::generation that it is meant for
  std::string run;                     // of the program that trains, for people
  uint64_t contribution_id = 0;
  kernels::Param param = kernels::Param::kWeight;
  std::optional<RowRange> contribution_rows;  // absent: all rows of the parameter
  std::optional<RowRange> rows;               // carried by this call; absent: contribution_rows
  kernels::DType dtype = kernels::DType::kFloat32;
  float scale = 1.0f;
};

// What all calls of one contribution must agree on.
struct ContributionTerms {
  kernels::Param param = kernels::Param::kWeight;
  RowRange rows;  // of the whole contribution
  kernels::DType dtype = kernels::DType::kFloat32;
  float scale = 1.0f;
  friend bool operator==(const ContributionTerms&, const ContributionTerms&) = default;
};

class HeadSession;

// Counts one call as long as it lives. Thread-safe.
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

// An open call; Engine::AddRows takes its rows.
struct Contribution {
  std::shared_ptr<HeadSession> session;  // of the head, which may have been deleted since
  HeadState state;                       // when it was opened
  Binding binding;                       // all rows of a call are added to one generation
  uint64_t id = 0;
  ContributionTerms terms;
  RowRange rows;     // carried by this call
  int64_t cols = 1;  // elements of a row
  std::string run;   // ContributionSpec::run
  // Counts as an open call of the head until all copies are gone.
  std::shared_ptr<const CountedCall> counted;

  int64_t row_bytes() const { return cols * static_cast<int64_t>(kernels::SizeOf(terms.dtype)); }
};

// What became of the rows of one message.
struct AddedRows {
  int64_t rows = 0;  // that had not been added before
  HeadState state;   // when they were added
};

// OUT_OF_RANGE naming the row and column of the first element that is not finite, or whose product with the
// scale is not finite in fp32. `values` are `rows` of the contribution. Thread-safe.
absl::Status CheckFinite(const Contribution& contribution, RowRange rows, absl::Span<const uint8_t> values);

// A 64-bit checksum of each row of `values`, whose rows have `row_bytes` > 0 bytes; never 0. Thread-safe.
std::vector<uint64_t> RowChecksums(absl::Span<const uint8_t> values, int64_t row_bytes);

// Which rows of which contributions have been added in the open step of one head, so that none is added
// twice. The counterpart of Ledger for gradients that come from outside; a row is known by a checksum of its
// values.
//
// Memory: 8 bytes for each row of each contribution, at most max_rows rows of max_contributions
// contributions. Thread-compatible: guarded by the engine's lock.
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
  // The contributions that were added in full, ascending.
  std::vector<uint64_t> CompleteIds() const;

  // Forgets everything (a new step).
  void Clear();

  int64_t contributions() const { return static_cast<int64_t>(contributions_.size()); }
  // How many of the contributions are part of the sum: rows of them were added, or there are none to add.
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

// What has been accumulated in the open step of one head: the rows of microbatches, and those of gradient
// contributions. A microbatch and a contribution never have the same id in one step.
//
// Plain state without threads or lock; the engine's lock guards it.
struct StepLedgers {
  // The limits hold for each of the two, and `memory` pays for both.
  StepLedgers(int64_t max_rows, int64_t max_microbatches, const RowMemory::Account& memory)
      : microbatches(max_rows, max_microbatches, memory), contributions(max_rows, max_microbatches, memory) {}

  // A line for each of the ids that is not complete.
  std::vector<std::string> Missing(absl::Span<const uint64_t> ids) const;
  // A line for each microbatch or contribution outside `ids` that was begun and is not complete.
  std::vector<std::string> Incomplete(absl::Span<const uint64_t> ids) const;
  // The ids of complete microbatches and contributions, ascending.
  std::vector<uint64_t> CompleteIds() const;
  // Empties both, which give their memory back.
  void Clear();

  Ledger microbatches;
  ContributionLedger contributions;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_LEDGER_H_
