// SPDX-License-Identifier: Apache-2.0
// What the ledger knows of the rows of one microbatch.
//
// Rows are declared in pieces (each stream declares its row range with its targets and row weights, or a
// backward with its gradients too); pieces may overlap if they agree. A declared row is pending, reserved (in
// a chunk that is being computed) or settled (accumulated, or ignored and so nothing to accumulate).
//
// Memory: 5 bytes per declared row and 4 for each kind of float that RowContents gives, and some hundred for
// the microbatch and each run of rows.
// Thread-compatible.
#ifndef LOSSD_SERVER_ENGINE_MICROBATCH_RECORD_H_
#define LOSSD_SERVER_ENGINE_MICROBATCH_RECORD_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "kernels/loss_options.h"
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

class MicrobatchRecord {
 public:
  // A microbatch of which no row has been declared.
  explicit MicrobatchRecord(const MicrobatchTerms& terms) : terms_(terms) {}

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
  // kIgnored: settled because there is nothing to accumulate, by a stream that has not ended yet.
  enum RowState : uint8_t { kPending, kReserved, kSettled, kIgnored };
  static bool IsSettled(uint8_t state) { return state >= kSettled; }

  // Of a map's node and the heap's blocks, beside the rows.
  static constexpr int64_t kRecordBytes = 256;
  static constexpr int64_t kSegmentBytes = 288;

  // The kinds of floats in RowContents, in its order.
  static constexpr size_t kFloats = 4;
  static constexpr std::array<float, kFloats> kIfAbsent = {1.0f, 1.0f, 0.0f, 0.0f};
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
  // Both keep the numbers.
  void Insert(int64_t first_row, Segment segment);
  Segment Remove(std::map<int64_t, Segment>::iterator it);
  // Gives the reserved ones among the rows another state; returns how many.
  int64_t ReplaceReserved(RowRange rows, RowState state);

  MicrobatchTerms terms_;
  std::map<int64_t, Segment> segments_;  // by first row; disjoint
  int64_t declared_rows_ = 0;
  int64_t settled_rows_ = 0;
  int64_t accumulated_rows_ = 0;  // of the settled ones, those with a target
  int64_t bytes_ = kRecordBytes;
  bool kept_ = false;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_MICROBATCH_RECORD_H_
