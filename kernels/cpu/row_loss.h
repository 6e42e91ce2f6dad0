// SPDX-License-Identifier: Apache-2.0
// RowLoss computes the loss of a row from its logits, and turns the logits in place into their gradient.
// PartExchange, below, connects the parts of a head that is split by vocabulary. Formulas in docs/math.md.
//
// p_y - 1 is never formed by subtraction: it is -(sum of the other exponentials) / (sum of all), which keeps
// full relative accuracy when p_y is close to 1. The row loss is (max - z_y) + log(sum exp(z - max)) in
// double, so that a common offset of the logits does not cost accuracy either.
//
// A row is computed in two steps, so that its classes may be divided over several devices. RowLoss::Summarise
// computes statistics of the classes here, which are then merged over all classes. RowLoss::Finish computes
// the row's results from them, and the gradient of the classes here.
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

// The values that all rows of a chunk share. The pointers outlive the object.
struct RowLossContext {
  LossOptions options;  // `gradients` is kExact, kFiltered or kSampled
  int64_t vocab_size = 0;
  // The classes here are [first_class, first_class + classes).
  int64_t first_class = 0;
  int64_t classes = 0;
  const float* bias = nullptr;           // [classes] or null
  const float* class_weights = nullptr;  // [V] or null (all 1)
  double class_weight_sum = 0.0;         // over all classes; V without class weights
  double own_weight_sum = 0.0;           // over the classes here
};

// What RowLoss computes of one row, and its inputs.
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
  // False for rows that are distilled without their targets: the loss with the target does not count and may
  // be infinite, and the row has no upstream gradient here.
  bool counts_target = true;
  bool keeps_logits = false;  // the logits must be kept until Finish
  float sample = 0.0f;        // SampleOf() of the row and the classes here, for sampled gradients
  // The single classes here of which Summarise writes the logits.
  int32_t top_k = 0;
  RankedClass* top = nullptr;        // out: [top_k], as SelectTop
  const int32_t* classes = nullptr;  // [class_count], indices in the vocabulary
  int32_t class_count = 0;
  float* class_logits = nullptr;  // out: [class_count]; 0 for classes elsewhere
};

// The statistics of a row over some of its classes. z are the logits.
struct RowStatistics {
  float max = 0.0f;         // the largest z; -infinity if all z are
  int32_t argmax = -1;      // the smallest class with the largest z, index in the vocabulary
  bool finite = true;       // all logits before a softcap are finite
  bool has_target = false;  // the target is among the classes
  float target_logit = 0.0f;
  float reference = 0.0f;   // exponents are relative to it: max, or 0 if max is -infinity
  double other_exp = 0.0;   // sum of exp(z - reference) without the target
  double moment = 0.0;      // sum of exp(z - reference) (z - reference), for the entropy
  double centred = 0.0;     // sum of u (z - reference), with label smoothing
  double weight_sum = 0.0;  // sum of u, with label smoothing
  // For soft targets, with weights q.
  double tail_exp = 0.0;     // sum of exp(z - reference) over classes that are no soft target
  double soft_dot = 0.0;     // sum of q (z - reference)
  double soft_weight = 0.0;  // sum of q
};

// The statistics of one row over the classes of all parts, added up in the order of the parts. For a single
// part, its own statistics. Thread-safe.
RowStatistics Merge(absl::Span<const RowStatistics* const> parts);

// The log-sum-exp of a row over all classes; NaN if it, or a logit, is not finite. Thread-safe.
double LogSumExp(const RowStatistics& all);

// Sums of a row's gradient, as in LossSums, over some of its classes or over all.
struct GradientSums {
  double dropped_mass = 0.0;  // for a filtered gradient
  double sampling_variance = 0.0;
  double squared_gradient = 0.0;
};

// The sums of one row over the classes of all parts, added up in the order of the parts. Thread-safe.
GradientSums Add(absl::Span<const GradientSums* const> parts);

// The results of one row, over all classes unless said otherwise.
struct RowResult {
  double loss = 0.0;    // with z-loss, times the row weight
  double z_loss = 0.0;  // times the row weight
  double lse = 0.0;
  double entropy = 0.0;  // if wanted
  double target_logprob = 0.0;
  double gradient_factor = 0.0;     // kappa of docs/math.md
  double divergence = 0.0;          // for a row with a teacher, as in LossSums
  double target_loss = 0.0;         // for a row with a teacher, as in LossSums
  GradientSums gradient;            // of the classes here
  ObjectiveTerm<double> objective;  // if there is an objective and the row is not absent
  int32_t argmax = -1;
  // Whether lse, loss, entropy, all factors of the gradient, and W x before a softcap are finite in fp32;
  // later also whether dx is finite. If false, the other members are unspecified. Always true for an absent
  // row: if its logits are not finite, lse, entropy and target_logprob are NaN and argmax is -1.
  bool finite = false;
};

// Computes rows of a chunk, one at a time. Thread-safe: it holds no mutable state.
class RowLoss {
 public:
  RowLoss(const RowLoops& loops, const RowLossContext& context) : loops_(loops), context_(context) {}

  // Computes the statistics of the classes here. `logits` [classes] holds logit_scale * W x (no bias yet) on
  // entry, and the values that Finish needs on return.
  RowStatistics Summarise(const RowRequest& request, float* logits) const;
  // `own`: the result of Summarise for these logits. `all`: merged from `own` and the other parts'
  // statistics. With want_gradient, the logits become dL/d(W x + b); otherwise their content is unspecified.
  RowResult Finish(const RowRequest& request, const RowStatistics& own, const RowStatistics& all,
                   float* logits) const;

 private:
  struct Sums;
  struct Others {  // numbers of classes here, before and after the target
    int64_t before;
    int64_t after;
  };

  // row_loss.cc describes these functions.
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
  // `kept`: the logits that MaskTargets has taken out.
  void Sample(const RowRequest& request, const RowStatistics& own, const Sums& sums, double target_gradient,
              const float* kept, RowResult& row, float* logits) const;
  bool KeepsLogits(const RowRequest& request) const;
  // The weights of the classes here, [classes] or null.
  const float* class_weights() const {
    return context_.class_weights == nullptr ? nullptr : context_.class_weights + context_.first_class;
  }
  double ClassWeight(int32_t target) const;

  const RowLoops& loops_;
  const RowLossContext context_;
};

// Samples the gradient [n] of a row with respect to its dot products, in place, except for element `target`,
// which is -1 if the target is elsewhere. omega: SampleOf() of the row and these classes. kappa: the gradient
// factor of the row. Thread-safe.
GradientSums SampleGradient(const LossOptions& options, double kappa, float omega, int64_t target, int64_t n,
                            float* gradient);

// Samples the classes of one row in their order (docs/math.md, "Sampled gradients"). Thread-compatible.
class RowSampler {
 public:
  // `threshold`: elements below this size are sampled; finite and >= 0. 0 leaves all elements as they are.
  RowSampler(float omega, float threshold) : sampler_(double{omega}), threshold_(threshold) {}

  // Samples the next `n` elements of the gradient in place. An element below the threshold becomes the
  // threshold, with the element's sign, or 0.
  void Sample(float* gradient, int64_t n);

  // For the elements so far, before sampling: variance() is the expected squared error of sampling, as if the
  // elements were drawn independently; square() is the sum of their squares.
  double variance() const { return variance_; }
  double square() const { return square_; }

 private:
  SystematicSampler<double> sampler_;
  const float threshold_;
  double variance_ = 0.0;
  double square_ = 0.0;
};

// Exchanges between the parts of a head that is split by vocabulary, for the rows of a chunk: they merge the
// statistics of all parts, and sums over all classes. PartExchange is the interface. SolePartExchange is for
// a head in one part, ThreadExchange for parts in one process, and RankExchange for parts in several
// processes. TimedExchange counts the time of another exchange.
//
// Every part calls the same functions in the same order, with the same rows, each part on a thread of its
// own. A function returns when all parts have called it. Contributions are added in the order of the parts,
// so all parts get the same bits. UNAVAILABLE if another part cannot be reached any more; then the chunk
// cannot be computed.

// Rows [begin, end).
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;

  friend bool operator==(const RowRange&, const RowRange&) = default;
};

// The rows of a part, if `rows` are divided evenly.
inline RowRange RowsOfPart(RowRange rows, int part, int parts) {
  const int64_t n = rows.end - rows.begin;
  return {rows.begin + n * part / parts, rows.begin + n * (part + 1) / parts};
}

// The rows that are in both ranges. If there are none, the result is empty and lies within `of`.
inline RowRange Intersect(RowRange rows, RowRange of) {
  return {std::clamp(rows.begin, of.begin, of.end), std::clamp(rows.end, of.begin, of.end)};
}

using MergeTaughtRow = absl::FunctionRef<void(int64_t row, absl::Span<const TaughtRow* const> of_part)>;

// The contract is in the comment above RowRange.
class PartExchange {
 public:
  virtual ~PartExchange() = default;

  // Sets merged[i] to the statistics of row i over the classes of all parts.
  virtual absl::Status MergeStatistics(int part, absl::Span<const RowStatistics> own,
                                       absl::Span<RowStatistics> merged) = 0;
  // Sets results[i].gradient to the sums of row i over the classes of all parts.
  virtual absl::Status MergeGradients(int part, absl::Span<const GradientSums> own,
                                      absl::Span<RowResult> results) = 0;
  // Calls merge(row, of_part) for each distilled row, with the TaughtRow of each part.
  virtual absl::Status MergeTaught(int part, absl::Span<const TaughtRow> own, MergeTaughtRow merge) = 0;
  // `own` [.., cols] has, for each row, sums over the part's classes. Returns a range of `rows`, in which
  // `own` then has the sums over all classes. Every row is returned to exactly one part.
  virtual absl::StatusOr<RowRange> SumRows(int part, float* own, RowRange rows, int64_t cols) = 0;
  // Adds `own` of all parts to `to` of every part; [n] each.
  virtual absl::Status AddSums(int part, const float* own, float* to, int64_t n) = 0;
  // Merges the first `k` classes of each row over all parts. `own` [rows, k] has this part's classes, as
  // SelectTop has written them. If `takes`, calls take(row, ranked) for every row with its k classes.
  virtual absl::Status MergeTop(int part, absl::Span<const RankedClass> own, int64_t k, bool takes,
                                TakeRanked take) = 0;
  // Call after SumRows with the same `own` and `rows`. Moves the rows `wanted` to the parts that deliver
  // them, and returns the rows that this part delivers.
  virtual absl::StatusOr<RowRange> CollectRows(int part, float* own, RowRange rows, RowRange wanted,
                                               int64_t cols) = 0;
};

// The exchange of a head that has all classes.
class SolePartExchange final : public PartExchange {
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

// The exchange between threads of one process. Each part delivers the rows that SumRows has given it.
class ThreadExchange final : public PartExchange {
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
  // The arguments of each part. Written before a barrier and read after it.
  std::vector<absl::Span<const RowStatistics>> statistics_;
  std::vector<absl::Span<const GradientSums>> gradients_;
  std::vector<absl::Span<const TaughtRow>> taught_;
  std::vector<const float*> floats_;
  std::vector<absl::Span<const RankedClass>> ranked_;
};

// Counts the time that parts spend in an exchange between threads of one process, including the wait for
// other parts. The time of part i is counted at member `first` + i of `clocks`. Thread-safe as the counted
// exchange.
class TimedExchange final : public PartExchange {
 public:
  TimedExchange(std::unique_ptr<PartExchange> exchange, std::shared_ptr<MemberExchanges> clocks,
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
  const std::unique_ptr<PartExchange> exchange_;
  const std::shared_ptr<MemberExchanges> clocks_;
  const int first_;
};

// Transfers bytes between ranks, which are processes with one part of the head each. Called by one thread at
// a time.
class RankTransfers {
 public:
  virtual ~RankTransfers() = default;

  virtual Replica replica() const = 0;  // this rank, and the number of ranks
  // A buffer for the bytes that a rank sends. It is aligned to 64, and has the same size for all ranks. The
  // next exchange overwrites it.
  virtual absl::Span<uint8_t> Room(int rank) = 0;
  // As HostTransfers::Exchange. Its time is counted as `kind`.
  virtual absl::Status Exchange(ExchangeKind kind, absl::Span<const RankTransfer> send,
                                absl::Span<const RankTransfer> receive) = 0;
};

// The exchange of a head with one part in each of several processes. Its sums have the same bits as those of
// a ThreadExchange with as many parts. Rank 0 delivers all rows.
class RankExchange final : public PartExchange {
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
  // Sends `own` [n] of every rank to all other ranks, in pieces. Calls `merge` for each piece, with the
  // elements [first, first + n) of all ranks in the order of the ranks.
  template <typename T>
  absl::Status ForAll(
      ExchangeKind kind, int part, const T* own, int64_t n,
      absl::FunctionRef<void(int64_t first, int64_t n, absl::Span<const T* const> of_rank)> merge);

  RankTransfers* const transfers_;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_ROW_LOSS_H_
