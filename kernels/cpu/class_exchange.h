// SPDX-License-Identifier: Apache-2.0
// What the parts of a head that is split by vocabulary tell each other about the rows of a chunk: statistics
// of their classes, and sums that go over all classes. ClassExchange is the interface. SoleExchange is for a
// head in one part, ThreadExchange for parts in one process (TimedExchange counts its time), and RankExchange
// for parts in several processes.
//
// A function is called by every part, on a thread of its own, with the same rows and in the same order; it
// returns when all have called. The parts are added up in their order, so all get the same bits.
// UNAVAILABLE if another part cannot be reached any more; then the chunk cannot be computed.
#ifndef LOSSD_KERNELS_CPU_CLASS_EXCHANGE_H_
#define LOSSD_KERNELS_CPU_CLASS_EXCHANGE_H_

#include <algorithm>
#include <barrier>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/cpu/row_loss.h"
#include "kernels/exchange_times.h"
#include "kernels/replica.h"

namespace lossd::kernels {

// Rows [begin, end).
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;

  friend bool operator==(const RowRange&, const RowRange&) = default;
};

// Which of some rows, divided evenly, are those of a part.
inline RowRange RowsOfPart(RowRange rows, int part, int parts) {
  const int64_t n = rows.end - rows.begin;
  return {rows.begin + n * part / parts, rows.begin + n * (part + 1) / parts};
}

// The rows that are in both; empty, and within `of`, if there are none.
inline RowRange Intersect(RowRange rows, RowRange of) {
  return {std::clamp(rows.begin, of.begin, of.end), std::clamp(rows.end, of.begin, of.end)};
}

// The contract is at the head of this file.
class ClassExchange {
 public:
  virtual ~ClassExchange() = default;

  // merged[i]: row i over the classes of all parts.
  virtual absl::Status MergeStatistics(int part, absl::Span<const RowStatistics> own,
                                       absl::Span<RowStatistics> merged) = 0;
  // results[i].gradient: of row i over the classes of all parts.
  virtual absl::Status MergeGradients(int part, absl::Span<const GradientSums> own,
                                      absl::Span<RowResult> results) = 0;
  // `own` [.., cols]: sums over the part's classes. Of `rows`, those that are returned become the sums over
  // all classes; every row is returned to one part.
  virtual absl::StatusOr<RowRange> SumRows(int part, float* own, RowRange rows, int64_t cols) = 0;
  // Adds the `own` of all parts to every `to`, [n] each.
  virtual absl::Status AddSums(int part, const float* own, float* to, int64_t n) = 0;
  // Brings the rows `wanted` of those that SumRows has divided, `rows`, to where they are delivered, and
  // returns those that this part delivers. `own` as in SumRows.
  virtual absl::StatusOr<RowRange> CollectRows(int part, float* own, RowRange rows, RowRange wanted,
                                               int64_t cols) = 0;
};

// For a head that has all classes.
class SoleExchange final : public ClassExchange {
 public:
  absl::Status MergeStatistics(int part, absl::Span<const RowStatistics> own,
                               absl::Span<RowStatistics> merged) override;
  absl::Status MergeGradients(int part, absl::Span<const GradientSums> own,
                              absl::Span<RowResult> results) override;
  absl::StatusOr<RowRange> SumRows(int part, float* own, RowRange rows, int64_t cols) override;
  absl::Status AddSums(int part, const float* own, float* to, int64_t n) override;
  absl::StatusOr<RowRange> CollectRows(int part, float* own, RowRange rows, RowRange wanted,
                                       int64_t cols) override;
};

// Between threads of one process, which deliver rows where they are.
class ThreadExchange final : public ClassExchange {
 public:
  // `parts` >= 1.
  explicit ThreadExchange(int parts);

  absl::Status MergeStatistics(int part, absl::Span<const RowStatistics> own,
                               absl::Span<RowStatistics> merged) override;
  absl::Status MergeGradients(int part, absl::Span<const GradientSums> own,
                              absl::Span<RowResult> results) override;
  absl::StatusOr<RowRange> SumRows(int part, float* own, RowRange rows, int64_t cols) override;
  absl::Status AddSums(int part, const float* own, float* to, int64_t n) override;
  absl::StatusOr<RowRange> CollectRows(int part, float* own, RowRange rows, RowRange wanted,
                                       int64_t cols) override;

 private:
  int parts() const { return static_cast<int>(floats_.size()); }

  std::barrier<> barrier_;
  // What each part has brought; written before a barrier and read after it.
  std::vector<absl::Span<const RowStatistics>> statistics_;
  std::vector<absl::Span<const GradientSums>> gradients_;
  std::vector<const float*> floats_;
};

// A class exchange between threads of one process whose time is counted, the wait for the other parts
// included: that of part i at member `first` + i. Thread-safe as the exchange that it counts.
class TimedExchange final : public ClassExchange {
 public:
  TimedExchange(std::unique_ptr<ClassExchange> exchange, std::shared_ptr<MemberExchanges> clocks,
                int first = 0)
      : exchange_(std::move(exchange)), clocks_(std::move(clocks)), first_(first) {}

  absl::Status MergeStatistics(int part, absl::Span<const RowStatistics> own,
                               absl::Span<RowStatistics> merged) override {
    const auto counting = clocks_->of(first_ + part).During(ExchangeKind::kRowStatistics);
    return exchange_->MergeStatistics(part, own, merged);
  }
  absl::Status MergeGradients(int part, absl::Span<const GradientSums> own,
                              absl::Span<RowResult> results) override {
    const auto counting = clocks_->of(first_ + part).During(ExchangeKind::kRowStatistics);
    return exchange_->MergeGradients(part, own, results);
  }
  absl::StatusOr<RowRange> SumRows(int part, float* own, RowRange rows, int64_t cols) override {
    const auto counting = clocks_->of(first_ + part).During(ExchangeKind::kHiddenGradients);
    return exchange_->SumRows(part, own, rows, cols);
  }
  absl::Status AddSums(int part, const float* own, float* to, int64_t n) override {
    const auto counting = clocks_->of(first_ + part).During(ExchangeKind::kHiddenGradients);
    return exchange_->AddSums(part, own, to, n);
  }
  absl::StatusOr<RowRange> CollectRows(int part, float* own, RowRange rows, RowRange wanted,
                                       int64_t cols) override {
    const auto counting = clocks_->of(first_ + part).During(ExchangeKind::kHiddenGradients);
    return exchange_->CollectRows(part, own, rows, wanted, cols);
  }

 private:
  const std::unique_ptr<ClassExchange> exchange_;
  const std::shared_ptr<MemberExchanges> clocks_;
  const int first_;
};

// What carries an exchange between ranks, which are processes with one part of the head each. Called by one
// thread at a time.
class RankTransfers {
 public:
  virtual ~RankTransfers() = default;

  virtual Replica replica() const = 0;  // this rank, of how many
  // Where to put what a rank sends: aligned to 64, of the same size for all ranks. Overwritten by the next
  // user.
  virtual absl::Span<uint8_t> Room(int rank) = 0;
  // As HostTransfers::Exchange; `kind` is what its time counts as.
  virtual absl::Status Exchange(ExchangeKind kind, absl::Span<const RankTransfer> send,
                                absl::Span<const RankTransfer> receive) = 0;
};

// The class exchange of a head whose parts lie in several processes, one in each. The bits of its sums are
// those of a ThreadExchange with as many parts. All rows are delivered by rank 0.
class RankExchange final : public ClassExchange {
 public:
  // `transfers` outlives the object.
  explicit RankExchange(RankTransfers* transfers) : transfers_(transfers) {}

  absl::Status MergeStatistics(int part, absl::Span<const RowStatistics> own,
                               absl::Span<RowStatistics> merged) override;
  absl::Status MergeGradients(int part, absl::Span<const GradientSums> own,
                              absl::Span<RowResult> results) override;
  absl::StatusOr<RowRange> SumRows(int part, float* own, RowRange rows, int64_t cols) override;
  absl::Status AddSums(int part, const float* own, float* to, int64_t n) override;
  absl::StatusOr<RowRange> CollectRows(int part, float* own, RowRange rows, RowRange wanted,
                                       int64_t cols) override;

 private:
  int ranks() const { return transfers_->replica().count; }
  // Has every rank send all of its `own` [n] to all others, and calls `merge` for pieces of it: elements
  // [first, first + n) of all ranks, in their order.
  template <typename T>
  absl::Status ForAll(
      ExchangeKind kind, int part, const T* own, int64_t n,
      absl::FunctionRef<void(int64_t first, int64_t n, absl::Span<const T* const> of_rank)> merge);

  RankTransfers* const transfers_;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_CLASS_EXCHANGE_H_
