// What the parts of a head that is split by vocabulary tell each other about the rows of a chunk: statistics
// of their classes, and sums that go over all classes.
//
// A function is called by every part, on a thread of its own, with the same rows and in the same order; it
// returns when all have called. The parts are added up in their order, so all get the same bits.
#ifndef LOSSD_KERNELS_CPU_CLASS_EXCHANGE_H_
#define LOSSD_KERNELS_CPU_CLASS_EXCHANGE_H_

#include <barrier>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/cpu/row_loss.h"

namespace lossd::kernels {

// Rows [begin, end).
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;
};

class ClassExchange {
 public:
  virtual ~ClassExchange() = default;

  // merged[i]: row i over the classes of all parts.
  virtual void MergeStatistics(int part, absl::Span<const RowStatistics> own,
                               absl::Span<RowStatistics> merged) = 0;
  // results[i].gradient: of row i over the classes of all parts.
  virtual void MergeGradients(int part, absl::Span<const GradientSums> own,
                              absl::Span<RowResult> results) = 0;
  // `own` [rows, cols]: sums over the part's classes. Those of the returned rows become the sums over all
  // classes; every row is returned to one part.
  virtual RowRange SumRows(int part, float* own, int64_t rows, int64_t cols) = 0;
  // Adds the `own` of all parts to every `to`, [n] each.
  virtual void AddSums(int part, const float* own, float* to, int64_t n) = 0;
};

// For a head that has all classes.
class SoleExchange final : public ClassExchange {
 public:
  void MergeStatistics(int part, absl::Span<const RowStatistics> own,
                       absl::Span<RowStatistics> merged) override;
  void MergeGradients(int part, absl::Span<const GradientSums> own, absl::Span<RowResult> results) override;
  RowRange SumRows(int part, float* own, int64_t rows, int64_t cols) override;
  void AddSums(int part, const float* own, float* to, int64_t n) override;
};

// Between threads of one process.
class ThreadExchange final : public ClassExchange {
 public:
  // `parts` >= 1.
  explicit ThreadExchange(int parts);

  void MergeStatistics(int part, absl::Span<const RowStatistics> own,
                       absl::Span<RowStatistics> merged) override;
  void MergeGradients(int part, absl::Span<const GradientSums> own, absl::Span<RowResult> results) override;
  RowRange SumRows(int part, float* own, int64_t rows, int64_t cols) override;
  void AddSums(int part, const float* own, float* to, int64_t n) override;

 private:
  int parts() const { return static_cast<int>(floats_.size()); }

  std::barrier<> barrier_;
  // What each part has brought; written before a barrier and read after it.
  std::vector<absl::Span<const RowStatistics>> statistics_;
  std::vector<absl::Span<const GradientSums>> gradients_;
  std::vector<const float*> floats_;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_CLASS_EXCHANGE_H_
