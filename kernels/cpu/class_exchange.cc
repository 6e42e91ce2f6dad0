#include "kernels/cpu/class_exchange.h"

#include <algorithm>

namespace lossd::kernels {

void SoleExchange::MergeStatistics(int, absl::Span<const RowStatistics> own,
                                   absl::Span<RowStatistics> merged) {
  std::copy(own.begin(), own.end(), merged.begin());
}

void SoleExchange::MergeGradients(int, absl::Span<const GradientSums> own, absl::Span<RowResult> results) {
  for (size_t row = 0; row < results.size(); ++row) results[row].gradient = own[row];
}

RowRange SoleExchange::SumRows(int, float*, int64_t rows, int64_t) { return {0, rows}; }

void SoleExchange::AddSums(int, const float* own, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] += own[i];
}

ThreadExchange::ThreadExchange(int parts)
    : barrier_(parts),
      statistics_(static_cast<size_t>(parts)),
      gradients_(static_cast<size_t>(parts)),
      floats_(static_cast<size_t>(parts)) {}

void ThreadExchange::MergeStatistics(int part, absl::Span<const RowStatistics> own,
                                     absl::Span<RowStatistics> merged) {
  statistics_[static_cast<size_t>(part)] = own;
  barrier_.arrive_and_wait();
  std::vector<const RowStatistics*> of_row(statistics_.size());
  for (size_t row = 0; row < merged.size(); ++row) {
    for (size_t i = 0; i < of_row.size(); ++i) of_row[i] = &statistics_[i][row];
    merged[row] = Merge(of_row);
  }
  barrier_.arrive_and_wait();  // until then nobody may write what others read
}

void ThreadExchange::MergeGradients(int part, absl::Span<const GradientSums> own,
                                    absl::Span<RowResult> results) {
  gradients_[static_cast<size_t>(part)] = own;
  barrier_.arrive_and_wait();
  for (size_t row = 0; row < results.size(); ++row) {
    GradientSums all;
    for (const absl::Span<const GradientSums> of_part : gradients_) {
      all.dropped_mass += of_part[row].dropped_mass;
      all.sampling_variance += of_part[row].sampling_variance;
      all.squared_gradient += of_part[row].squared_gradient;
    }
    results[row].gradient = all;
  }
  barrier_.arrive_and_wait();
}

// A part writes its rows of its own sums, which no other part reads.
RowRange ThreadExchange::SumRows(int part, float* own, int64_t rows, int64_t cols) {
  const RowRange range = {rows * part / parts(), rows * (part + 1) / parts()};
  floats_[static_cast<size_t>(part)] = own;
  barrier_.arrive_and_wait();
  for (int64_t i = range.begin * cols; i < range.end * cols; ++i) {
    float sum = 0.0f;
    for (const float* of_part : floats_) sum += of_part[i];
    own[i] = sum;
  }
  barrier_.arrive_and_wait();
  return range;
}

void ThreadExchange::AddSums(int part, const float* own, float* to, int64_t n) {
  floats_[static_cast<size_t>(part)] = own;
  barrier_.arrive_and_wait();
  for (int64_t i = 0; i < n; ++i) {
    float sum = 0.0f;
    for (const float* of_part : floats_) sum += of_part[i];
    to[i] += sum;
  }
  barrier_.arrive_and_wait();
}

}  // namespace lossd::kernels
