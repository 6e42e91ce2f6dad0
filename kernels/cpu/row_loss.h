// SPDX-License-Identifier: Apache-2.0
// One row of logits to its loss, and in place to the gradient of the classifier's output. Formulas in
// docs/math.md.
//
// p_y - 1 is never formed by subtraction: it is -(sum of the other exponentials) / (sum of all), which keeps
// full relative accuracy when p_y is close to 1. The row loss is (max - z_y) + log(sum exp(z - max)) in
// double, so that a common offset of the logits does not cost accuracy either.
//
// A row is computed in two steps, so that its classes may lie on several devices: statistics of the classes
// that are here, and, from those of all classes together, its results and the gradient of those that are
// here.
#ifndef LOSSD_KERNELS_CPU_ROW_LOSS_H_
#define LOSSD_KERNELS_CPU_ROW_LOSS_H_

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
#include "kernels/cpu/divergence.h"
#include "kernels/cpu/row_classes.h"
#include "kernels/cpu/row_loops.h"
#include "kernels/decision.h"
#include "kernels/exchange_times.h"
#include "kernels/head_config.h"
#include "kernels/replica.h"

namespace lossd::kernels {

// What all rows of a chunk share. Pointers are borrowed.
struct RowLossContext {
  LossOptions options;  // `gradients` is kExact, kFiltered or kSampled
  int64_t vocab_size = 0;
  // The classes that are here: [first_class, first_class + classes).
  int64_t first_class = 0;
  int64_t classes = 0;
  const float* bias = nullptr;           // [classes] or null
  const float* class_weights = nullptr;  // [V] or null (all 1)
  double class_weight_sum = 0.0;         // over all classes; V without class weights
  double own_weight_sum = 0.0;           // over those that are here
};

struct RowRequest {
  int32_t target = 0;         // in [0, V)
  float row_weight = 1.0f;    // multiplies the loss
  double grad_loss = 1.0;     // dL/d(row loss / row_weight): grad_scale * row weight * upstream
  float grad_lse = 0.0f;      // dL/dlse
  float grad_entropy = 0.0f;  // dL/dentropy, the objective's bonus included
  ObjectiveNumbers<double> numbers;
  const SoftRow* targets = nullptr;  // with LossOptions::rest, else null
  bool want_gradient = false;
  bool want_entropy = false;
  bool absent = false;  // IsAbsent(); then want_gradient is false
  // false: the loss with the target does not count, so that it may be infinite; then the row has no upstream
  // gradient here. Of rows that are distilled without their targets.
  bool counts_target = true;
  bool keeps_logits = false;  // until Finish
  float sample = 0.0f;        // SampleOf() of the row and the classes that are here, of sampled gradients
  // What Summarise says of single classes among those that are here.
  int32_t top_k = 0;
  RankedClass* top = nullptr;        // out: [top_k], as SelectTop
  const int32_t* classes = nullptr;  // [class_count], counted from the first of the vocabulary
  int32_t class_count = 0;
  float* class_logits = nullptr;  // out: [class_count]; 0 of classes elsewhere
};

// What some classes of a row say of it. z are the logits.
struct RowStatistics {
  float max = 0.0f;         // the largest z; -infinity if all are
  int32_t argmax = -1;      // the smallest class that has it, counted from the first of the vocabulary
  bool finite = true;       // all logits before a softcap
  bool has_target = false;  // the target is among the classes
  float target_logit = 0.0f;
  float reference = 0.0f;   // that exponents are relative to: max, or 0 where that is -infinity
  double other_exp = 0.0;   // sum of exp(z - reference), the target left out
  double moment = 0.0;      // sum of exp(z - reference) (z - reference), if the entropy is needed
  double centred = 0.0;     // sum of u (z - reference), with label smoothing
  double weight_sum = 0.0;  // sum of u, with label smoothing
  // With soft targets, whose weights are q.
  double tail_exp = 0.0;     // sum of exp(z - reference) over classes that are not named
  double soft_dot = 0.0;     // sum of q (z - reference)
  double soft_weight = 0.0;  // sum of q
};

// The statistics of one row over the classes of all parts. The parts are added up in their order; of one part
// alone the result is what that part says. Thread-safe.
RowStatistics Merge(absl::Span<const RowStatistics* const> parts);

// The log-sum-exp of a row over all classes; NaN if it, or a logit, is not finite. Thread-safe.
double LogSumExp(const RowStatistics& all);

// What is said of the gradient of a row, as in LossSums: of some of its classes, or of all.
struct GradientSums {
  double dropped_mass = 0.0;  // of a filtered gradient
  double sampling_variance = 0.0;
  double squared_gradient = 0.0;
};

// The sums of one row over the classes of all parts, added up in their order. Thread-safe.
GradientSums Add(absl::Span<const GradientSums* const> parts);

struct RowResult {
  double loss = 0.0;    // with z-loss, times the row weight
  double z_loss = 0.0;  // times the row weight
  double lse = 0.0;
  double entropy = 0.0;  // if wanted
  double target_logprob = 0.0;
  double gradient_factor = 0.0;     // kappa of docs/math.md
  double divergence = 0.0;          // of a row with a teacher, as in LossSums
  double target_loss = 0.0;         // likewise
  GradientSums gradient;            // of the classes that are here
  ObjectiveTerm<double> objective;  // if there is one, and the row is not absent
  int32_t argmax = -1;
  // Whether lse, loss, entropy and everything that scales the gradient are finite in fp32, and W x before a
  // softcap too; later also whether dx is. If false, the rest is unspecified. Always true of an absent row,
  // of which lse, entropy and target_logprob are NaN and argmax is -1 if it has none.
  bool finite = false;
};

// Computes rows of a chunk, one at a time. Thread-safe: it holds no mutable state.
class RowLoss {
 public:
  RowLoss(const RowLoops& loops, const RowLossContext& context) : loops_(loops), context_(context) {}

  // `logits` [classes] holds logit_scale * W x (no bias yet), and afterwards what Finish needs.
  RowStatistics Summarise(const RowRequest& request, float* logits) const;
  // `own`: what Summarise said of these logits; `all`: merged from that and the other parts. With
  // want_gradient the logits become dL/d(W x + b), else their content is unspecified.
  RowResult Finish(const RowRequest& request, const RowStatistics& own, const RowStatistics& all,
                   float* logits) const;

 private:
  struct Sums;
  struct Others {
    int64_t before;
    int64_t after;
  };

  bool Transform(float* logits) const;
  bool IsHere(int64_t place) const { return place >= 0 && place < context_.classes; }
  void SummariseTargets(const RowRequest& request, float* logits, RowStatistics& own) const;
  void MaskTargets(const RowRequest& request, float* logits, float* kept) const;
  void WriteTargets(const RowRequest& request, const RowResult& row, const Sums& sums, const float* kept,
                    float* logits) const;
  void NameClasses(const RowRequest& request, const float* logits) const;
  double SumExponentials(const RowRequest& request, const RowStatistics& own, float* logits) const;
  Others OthersOf(const RowRequest& request, const RowStatistics& own) const;
  Sums SumsOf(const RowStatistics& own, const RowStatistics& all) const;
  double Drop(const RowRequest& request, const RowStatistics& own, const Sums& sums, float* logits) const;
  double TargetGradient(const RowRequest& request, const RowResult& row, const Sums& sums) const;
  void WriteGradient(const RowRequest& request, const RowResult& row, const Sums& sums, double smoothing,
                     float* logits) const;
  // `kept`: what MaskTargets has taken out of the logits.
  void Sample(const RowRequest& request, const RowStatistics& own, const Sums& sums, double target_gradient,
              const float* kept, RowResult& row, float* logits) const;
  bool KeepsLogits(const RowRequest& request) const;
  // Of the classes that are here, [classes] or null.
  const float* class_weights() const {
    return context_.class_weights == nullptr ? nullptr : context_.class_weights + context_.first_class;
  }
  double ClassWeight(int32_t target) const;

  const RowLoops& loops_;
  const RowLossContext context_;
};

// Samples in place the gradient [n] of a row with respect to its dot products, but for element `target`,
// which is -1 if it is elsewhere. omega: SampleOf() of the row and these classes; kappa: of the row.
// Thread-safe.
GradientSums SampleGradient(const LossOptions& options, double kappa, float omega, int64_t target, int64_t n,
                            float* gradient);

// Samples the classes of one row in their order (docs/math.md, "Sampled gradients"). Thread-compatible.
class RowSampler {
 public:
  // `threshold`: of the size of an element, finite and >= 0; 0 leaves all elements as they are.
  RowSampler(float omega, float threshold) : sampler_(double{omega}), threshold_(threshold) {}

  // In place, the next `n` elements of the gradient: those below the threshold become the threshold, with
  // their sign, or 0.
  void Sample(float* gradient, int64_t n);

  // Of the elements so far, before sampling: what sampling is expected to add to the square of their
  // difference, if they were drawn independently, and the sum of their squares.
  double variance() const { return variance_; }
  double square() const { return square_; }

 private:
  SystematicSampler<double> sampler_;
  const float threshold_;
  double variance_ = 0.0;
  double square_ = 0.0;
};

// What the parts of a head that is split by vocabulary tell each other about the rows of a chunk: statistics
// of their classes, and sums that go over all classes. ClassExchange is the interface. SoleExchange is for a
// head in one part, ThreadExchange for parts in one process (TimedExchange counts its time), and RankExchange
// for parts in several processes.
//
// A function is called by every part, on a thread of its own, with the same rows and in the same order; it
// returns when all have called. The parts are added up in their order, so all get the same bits.
// UNAVAILABLE if another part cannot be reached any more; then the chunk cannot be computed.

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

using MergeTaughtRow = absl::FunctionRef<void(int64_t row, absl::Span<const TaughtRow* const> of_part)>;

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
  // Calls merge(row, what all parts say of it) for each row of those that are distilled.
  virtual absl::Status MergeTaught(int part, absl::Span<const TaughtRow> own, MergeTaughtRow merge) = 0;
  // `own` [.., cols]: sums over the part's classes. Of `rows`, those that are returned become the sums over
  // all classes; every row is returned to one part.
  virtual absl::StatusOr<RowRange> SumRows(int part, float* own, RowRange rows, int64_t cols) = 0;
  // Adds the `own` of all parts to every `to`, [n] each.
  virtual absl::Status AddSums(int part, const float* own, float* to, int64_t n) = 0;
  // The `k` first of all parts' classes in each row, of `own` [rows, k], as SelectTop left them there. Calls
  // take(row, ranked) of every row, with [k] classes, if `takes`.
  virtual absl::Status MergeTop(int part, absl::Span<const RankedClass> own, int64_t k, bool takes,
                                TakeRanked take) = 0;
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
  absl::Status MergeTaught(int part, absl::Span<const TaughtRow> own, MergeTaughtRow merge) override;
  absl::StatusOr<RowRange> SumRows(int part, float* own, RowRange rows, int64_t cols) override;
  absl::Status AddSums(int part, const float* own, float* to, int64_t n) override;
  absl::Status MergeTop(int part, absl::Span<const RankedClass> own, int64_t k, bool takes,
                        TakeRanked take) override;
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
  absl::Status MergeTaught(int part, absl::Span<const TaughtRow> own, MergeTaughtRow merge) override;
  absl::StatusOr<RowRange> SumRows(int part, float* own, RowRange rows, int64_t cols) override;
  absl::Status AddSums(int part, const float* own, float* to, int64_t n) override;
  absl::Status MergeTop(int part, absl::Span<const RankedClass> own, int64_t k, bool takes,
                        TakeRanked take) override;
  absl::StatusOr<RowRange> CollectRows(int part, float* own, RowRange rows, RowRange wanted,
                                       int64_t cols) override;

 private:
  int parts() const { return static_cast<int>(floats_.size()); }

  std::barrier<> barrier_;
  // What each part has brought; written before a barrier and read after it.
  std::vector<absl::Span<const RowStatistics>> statistics_;
  std::vector<absl::Span<const GradientSums>> gradients_;
  std::vector<absl::Span<const TaughtRow>> taught_;
  std::vector<const float*> floats_;
  std::vector<absl::Span<const RankedClass>> ranked_;
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
  absl::Status MergeTaught(int part, absl::Span<const TaughtRow> own, MergeTaughtRow merge) override {
    const auto counting = clocks_->of(first_ + part).During(ExchangeKind::kRowStatistics);
    return exchange_->MergeTaught(part, own, merge);
  }
  absl::StatusOr<RowRange> SumRows(int part, float* own, RowRange rows, int64_t cols) override {
    const auto counting = clocks_->of(first_ + part).During(ExchangeKind::kHiddenGradients);
    return exchange_->SumRows(part, own, rows, cols);
  }
  absl::Status AddSums(int part, const float* own, float* to, int64_t n) override {
    const auto counting = clocks_->of(first_ + part).During(ExchangeKind::kHiddenGradients);
    return exchange_->AddSums(part, own, to, n);
  }
  absl::Status MergeTop(int part, absl::Span<const RankedClass> own, int64_t k, bool takes,
                        TakeRanked take) override {
    const auto counting = clocks_->of(first_ + part).During(ExchangeKind::kRowStatistics);
    return exchange_->MergeTop(part, own, k, takes, take);
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
  absl::Status MergeTaught(int part, absl::Span<const TaughtRow> own, MergeTaughtRow merge) override;
  absl::StatusOr<RowRange> SumRows(int part, float* own, RowRange rows, int64_t cols) override;
  absl::Status AddSums(int part, const float* own, float* to, int64_t n) override;
  absl::Status MergeTop(int part, absl::Span<const RankedClass> own, int64_t k, bool takes,
                        TakeRanked take) override;
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

#endif  // LOSSD_KERNELS_CPU_ROW_LOSS_H_
