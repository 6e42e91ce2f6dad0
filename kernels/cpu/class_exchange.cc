// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/class_exchange.h"

#include <algorithm>
#include <type_traits>
#include <vector>

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

namespace {

RankTransfer Sending(int rank, const void* data, int64_t elements, size_t size) {
  return {rank, const_cast<void*>(data), static_cast<size_t>(elements) * size};
}

int64_t RowsOf(RowRange range) { return range.end - range.begin; }

}  // namespace

template <typename T>
absl::Status RankExchange::ForAll(
    ExchangeKind kind, int part, const T* own, int64_t n,
    absl::FunctionRef<void(int64_t first, int64_t n, absl::Span<const T* const> of_rank)> merge) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::vector<const T*> of_rank(static_cast<size_t>(ranks()));
  const auto most = static_cast<int64_t>(transfers_->Room(part).size() / sizeof(T));
  for (int64_t first = 0; first < n; first += most) {
    const int64_t count = std::min(most, n - first);
    std::vector<RankTransfer> send, receive;
    for (int rank = 0; rank < ranks(); ++rank) {
      of_rank[static_cast<size_t>(rank)] = own + first;
      if (rank == part) continue;
      uint8_t* const room = transfers_->Room(rank).data();
      of_rank[static_cast<size_t>(rank)] = reinterpret_cast<const T*>(room);
      send.push_back(Sending(rank, own + first, count, sizeof(T)));
      receive.push_back({rank, room, static_cast<size_t>(count) * sizeof(T)});
    }
    if (absl::Status status = transfers_->Exchange(kind, send, receive); !status.ok()) return status;
    merge(first, count, of_rank);
  }
  return absl::OkStatus();
}

// All ranks wait for each other even if the chunk has no rows: afterwards all of them have read the chunk.
absl::Status RankExchange::MergeStatistics(int part, absl::Span<const RowStatistics> own,
                                           absl::Span<RowStatistics> merged) {
  const RowStatistics none;
  if (own.empty()) return ForAll<RowStatistics>(ExchangeKind::kRowStatistics, part, &none, 1, [](auto...) {});
  std::vector<const RowStatistics*> of_row(static_cast<size_t>(ranks()));
  return ForAll<RowStatistics>(ExchangeKind::kRowStatistics, part, own.data(),
                               static_cast<int64_t>(own.size()),
                               [&](int64_t first, int64_t n, absl::Span<const RowStatistics* const> of_rank) {
                                 for (int64_t row = 0; row < n; ++row) {
                                   for (size_t i = 0; i < of_row.size(); ++i) of_row[i] = of_rank[i] + row;
                                   merged[static_cast<size_t>(first + row)] = Merge(of_row);
                                 }
                               });
}

absl::Status RankExchange::MergeGradients(int part, absl::Span<const GradientSums> own,
                                          absl::Span<RowResult> results) {
  std::vector<const GradientSums*> of_row(static_cast<size_t>(ranks()));
  return ForAll<GradientSums>(ExchangeKind::kRowStatistics, part, own.data(),
                              static_cast<int64_t>(own.size()),
                              [&](int64_t first, int64_t n, absl::Span<const GradientSums* const> of_rank) {
                                for (int64_t row = 0; row < n; ++row) {
                                  for (size_t i = 0; i < of_row.size(); ++i) of_row[i] = of_rank[i] + row;
                                  results[static_cast<size_t>(first + row)].gradient = Add(of_row);
                                }
                              });
}

// Each rank sends the others their rows, and adds up what comes for its own, in pieces of a room's size.
absl::StatusOr<RowRange> RankExchange::SumRows(int part, float* own, RowRange rows, int64_t cols) {
  const auto most = static_cast<int64_t>(transfers_->Room(part).size() / sizeof(float));
  const RowRange here = RowsOfPart(rows, part, ranks());
  int64_t longest = 0;
  for (int rank = 0; rank < ranks(); ++rank) {
    longest = std::max(longest, RowsOf(RowsOfPart(rows, rank, ranks())) * cols);
  }
  std::vector<const float*> of_rank(static_cast<size_t>(ranks()));
  for (int64_t done = 0; done < longest; done += most) {
    const int64_t n = std::clamp<int64_t>(RowsOf(here) * cols - done, 0, most);
    float* const sums = own + here.begin * cols + done;
    std::vector<RankTransfer> send, receive;
    for (int rank = 0; rank < ranks(); ++rank) {
      of_rank[static_cast<size_t>(rank)] = sums;
      if (rank == part) continue;
      const RowRange theirs = RowsOfPart(rows, rank, ranks());
      const int64_t n_theirs = std::clamp<int64_t>(RowsOf(theirs) * cols - done, 0, most);
      if (n_theirs > 0) {
        send.push_back(Sending(rank, own + theirs.begin * cols + done, n_theirs, sizeof(float)));
      }
      uint8_t* const room = transfers_->Room(rank).data();
      of_rank[static_cast<size_t>(rank)] = reinterpret_cast<const float*>(room);
      if (n > 0) receive.push_back({rank, room, static_cast<size_t>(n) * sizeof(float)});
    }
    if (absl::Status status = transfers_->Exchange(ExchangeKind::kHiddenGradients, send, receive);
        !status.ok())
      return status;
    for (int64_t i = 0; i < n; ++i) {
      float sum = 0.0f;
      for (const float* of_part : of_rank) sum += of_part[i];
      sums[i] = sum;
    }
  }
  return here;
}

absl::Status RankExchange::AddSums(int part, const float* own, float* to, int64_t n) {
  return ForAll<float>(ExchangeKind::kHiddenGradients, part, own, n,
                       [&](int64_t first, int64_t count, absl::Span<const float* const> of_rank) {
                         for (int64_t i = 0; i < count; ++i) {
                           float sum = 0.0f;
                           for (const float* of_part : of_rank) sum += of_part[i];
                           to[first + i] += sum;
                         }
                       });
}

absl::StatusOr<RowRange> RankExchange::CollectRows(int part, float* own, RowRange rows, RowRange wanted,
                                                   int64_t cols) {
  std::vector<RankTransfer> send, receive;
  for (int rank = 1; rank < ranks(); ++rank) {
    const RowRange theirs = Intersect(wanted, RowsOfPart(rows, rank, ranks()));
    if (RowsOf(theirs) <= 0 || (part != 0 && part != rank)) continue;
    float* const first = own + theirs.begin * cols;
    const size_t bytes = static_cast<size_t>(RowsOf(theirs) * cols) * sizeof(float);
    if (part == 0) {
      receive.push_back({rank, first, bytes});
    } else {
      send.push_back({0, first, bytes});
    }
  }
  if (absl::Status status = transfers_->Exchange(ExchangeKind::kHiddenGradients, send, receive); !status.ok())
    return status;
  return part == 0 ? Intersect(wanted, rows) : RowRange();
}

}  // namespace lossd::kernels
