// SPDX-License-Identifier: Apache-2.0
// A class exchange between threads of one process whose time is counted, the wait for the other parts
// included: that of part i at member `first` + i. Thread-safe as what it counts.
#ifndef LOSSD_KERNELS_CPU_TIMED_EXCHANGE_H_
#define LOSSD_KERNELS_CPU_TIMED_EXCHANGE_H_

#include <memory>
#include <utility>

#include "kernels/cpu/class_exchange.h"
#include "kernels/exchange_times.h"

namespace lossd::kernels {

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

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_TIMED_EXCHANGE_H_
