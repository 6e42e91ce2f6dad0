// What has been accumulated in the open step of one head, row by row, so that nothing is counted twice.
//
// A microbatch is declared piece by piece (each stream declares its row range with its targets and row
// weights, or a backward with its gradients too); pieces may overlap if they agree. A declared row is
// pending, reserved (in a chunk that is being computed) or settled (accumulated, or ignored and so nothing
// to accumulate). Rows are kept themselves, not hashes: the same id with other contents is always noticed.
// What ends without accumulating anything is withdrawn again, and leaves no trace.
//
// Memory: 5 bytes per declared row and 4 for each kind of float that RowContents gives, and some hundred for
// each microbatch and each run of rows; at most max_rows rows of max_microbatches microbatches, and what
// RowMemory has.
// Thread-compatible: guarded by the engine's lock.
#ifndef LOSSD_SERVER_ENGINE_LEDGER_H_
#define LOSSD_SERVER_ENGINE_LEDGER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/loss_options.h"
#include "server/engine/row_memory.h"
#include "server/engine/stream.h"

namespace lossd::engine {

// What all streams of one microbatch must agree on.
struct MicrobatchTerms {
  int64_t microbatch_rows = 0;
  kernels::LossOptions options;
  kernels::DType hidden_dtype = kernels::DType::kFloat32;
  Reduction reduction = Reduction::kSum;
  double normalizer = 1.0;  // as resolved
  float grad_output = 1.0f;
  // Set for streams in order only (sequencer.h), whose rows are computed with those of other streams.
  bool want_grad_hidden = false;
  bool want_row_entropy = false;
  friend bool operator==(const MicrobatchTerms&, const MicrobatchTerms&) = default;
};

// What is known of some rows besides their hidden states, each [rows].
struct RowContents {
  absl::Span<const int32_t> targets;     // classes or kernels::kIgnoredTarget
  absl::Span<const float> row_weights;   // may be empty: 1
  absl::Span<const float> grad_loss;     // may be empty: 1
  absl::Span<const float> grad_lse;      // may be empty: 0
  absl::Span<const float> grad_entropy;  // may be empty: 0
};

// The same, with memory of its own.
struct RowValues {
  std::vector<int32_t> targets;
  std::vector<float> row_weights, grad_loss, grad_lse, grad_entropy;
};

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
  // kIgnored: settled because there is nothing to accumulate, by a stream that has not ended yet.
  enum RowState : uint8_t { kPending, kReserved, kSettled, kIgnored };
  static bool IsSettled(uint8_t state) { return state >= kSettled; }

  // Of a map's node and the heap's blocks, beside the rows.
  static constexpr int64_t kMicrobatchBytes = 256;
  static constexpr int64_t kSegmentBytes = 288;

  // The kinds of floats in RowContents, in its order.
  static constexpr size_t kFloats = 4;
  static constexpr std::array<float, kFloats> kIfAbsent = {1.0f, 1.0f, 0.0f, 0.0f};

  // A contiguous run of declared rows.
  struct Segment {
    std::vector<int32_t> targets;
    std::array<std::vector<float>, kFloats> floats;  // each may be empty
    std::vector<uint8_t> states;

    int64_t rows() const { return static_cast<int64_t>(states.size()); }
    int64_t bytes() const;
    // The part [first, first + count).
    Segment Part(size_t first, size_t count) const;
  };
  struct Microbatch {
    MicrobatchTerms terms;
    std::map<int64_t, Segment> segments;  // by first row; disjoint
    int64_t settled_rows = 0;
    int64_t accumulated_rows = 0;  // of the settled ones, those with a target
    bool kept = false;             // a stream of it has ended well
    bool complete() const { return settled_rows == terms.microbatch_rows; }
    bool begun() const { return accumulated_rows > 0 || complete(); }
    bool half_done() const { return accumulated_rows > 0 && !complete(); }
  };

  // Calls fn(segment, first index in segment, number of rows, first row) for each run of declared rows in
  // `rows`.
  template <typename MicrobatchT, typename Fn>
  static void ForEachRun(MicrobatchT& microbatch, RowRange rows, Fn fn);
  static std::array<absl::Span<const float>, kFloats> FloatsOf(const RowContents& contents);
  static absl::Status CheckAgreement(uint64_t id, const Microbatch& known, RowRange rows,
                                     const RowContents& contents);
  static std::vector<RowRange> Undeclared(const Microbatch& microbatch, RowRange rows);
  // RESOURCE_EXHAUSTED if so many rows more, of a microbatch that is new or not, are too many.
  absl::Status CheckLimits(uint64_t id, bool is_new, int64_t rows) const;
  static Segment MakeSegment(RowRange piece, RowRange rows, const RowContents& contents);
  // Both count what they add or remove, but not its memory.
  void Insert(Microbatch& microbatch, int64_t first_row, Segment segment);
  Segment Remove(Microbatch& microbatch, std::map<int64_t, Segment>::iterator it);
  // The parts of a segment that stay if `rows` of it are withdrawn, [first, last) by index.
  static std::vector<std::pair<size_t, size_t>> Staying(const Segment& segment, size_t first, size_t last);
  // Runs `change`, which may change what is settled of the microbatch, and keeps the counters of
  // microbatches.
  template <typename Change>
  void Update(Microbatch& microbatch, Change change);
  // Gives the reserved ones among the rows another state; returns how many.
  static int64_t ReplaceReserved(Microbatch& microbatch, RowRange rows, RowState state);
  static std::string DescribeMissing(uint64_t id, const Microbatch& microbatch);

  const int64_t max_rows_;
  const int64_t max_microbatches_;
  RowMemory::Account memory_;
  std::map<uint64_t, Microbatch> microbatches_;
  int64_t begun_ = 0;
  int64_t half_done_ = 0;
  int64_t accumulated_rows_ = 0;
  int64_t declared_rows_ = 0;
  int64_t bytes_ = 0;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_LEDGER_H_
