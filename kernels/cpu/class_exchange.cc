// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/class_exchange.h"

#include <algorithm>

namespace lossd::kernels {

absl::Status SoleExchange::MergeStatistics(int, absl::Span<const RowStatistics> own,
                                           absl::Span<RowStatistics> merged) {
  std::copy(own.begin(), own.end(), merged.begin());
  return absl::OkStatus();
}

absl::Status SoleExchange::MergeGradients(int, absl::Span<const GradientSums> own,
                                          absl::Span<RowResult> results) {
  for (size_t row = 0; row < results.size(); ++row) results[row].gradient = own[row];
  return absl::OkStatus();
}

absl::StatusOr<RowRange> SoleExchange::SumRows(int, float*, RowRange rows, int64_t) { return rows; }

absl::Status SoleExchange::AddSums(int, const float* own, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] += own[i];
  return absl::OkStatus();
}

absl::StatusOr<RowRange> SoleExchange::CollectRows(int, float*, RowRange rows, RowRange wanted, int64_t) {
  return Intersect(wanted, rows);
}

ThreadExchange::ThreadExchange(int parts)
    : barrier_(parts),
      statistics_(static_cast<size_t>(parts)),
      gradients_(static_cast<size_t>(parts)),
      floats_(static_cast<size_t>(parts)) {}

absl::Status ThreadExchange::MergeStatistics(int part, absl::Span<const RowStatistics> own,
                                             absl::Span<RowStatistics> merged) {
  statistics_[static_cast<size_t>(part)] = own;
  barrier_.arrive_and_wait();
  std::vector<const RowStatistics*> of_row(statistics_.size());
  for (size_t row = 0; row < merged.size(); ++row) {
    for (size_t i = 0; i < of_row.size(); ++i) of_row[i] = &statistics_[i][row];
    merged[row] = Merge(of_row);
  }
  barrier_.arrive_and_wait();  // until then nobody may write what others read
  return absl::OkStatus();
}

absl::Status ThreadExchange::MergeGradients(int part, absl::Span<const GradientSums> own,
                                            absl::Span<RowResult> results) {
  gradients_[static_cast<size_t>(part)] = own;
  barrier_.arrive_and_wait();
  std::vector<const GradientSums*> of_row(gradients_.size());
  for (size_t row = 0; row < results.size(); ++row) {
    for (size_t i = 0; i < of_row.size(); ++i) of_row[i] = &gradients_[i][row];
    results[row].gradient = Add(of_row);
  }
  barrier_.arrive_and_wait();
  return absl::OkStatus();
}

// A part writes its rows of its own sums, which no other part reads.
absl::StatusOr<RowRange> ThreadExchange::SumRows(int part, float* own, RowRange rows, int64_t cols) {
  const RowRange range = RowsOfPart(rows, part, parts());
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

absl::Status ThreadExchange::AddSums(int part, const float* own, float* to, int64_t n) {
  floats_[static_cast<size_t>(part)] = own;
  barrier_.arrive_and_wait();
  for (int64_t i = 0; i < n; ++i) {
    float sum = 0.0f;
    for (const float* of_part : floats_) sum += of_part[i];
    to[i] += sum;
  }
  barrier_.arrive_and_wait();
  return absl::OkStatus();
}

absl::StatusOr<RowRange> ThreadExchange::CollectRows(int part, float*, RowRange rows, RowRange wanted,
                                                     int64_t) {
  return Intersect(wanted, RowsOfPart(rows, part, parts()));
}

}  // namespace lossd::kernels
