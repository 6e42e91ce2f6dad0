// SPDX-License-Identifier: Apache-2.0
// How long a rank is in its exchanges with other ranks, by what is exchanged.
//
// ExchangeClocks is thread-safe.
#ifndef LOSSD_KERNELS_EXCHANGE_TIMES_H_
#define LOSSD_KERNELS_EXCHANGE_TIMES_H_

#include <array>
#include <cstddef>
#include <memory>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "kernels/busy_clock.h"

namespace lossd::kernels {

enum class ExchangeKind {
  kSumGradients,     // of a step, by rows
  kSpreadValues,     // likewise
  kRowStatistics,    // of a chunk by vocabulary: what the parts of a head say of its rows
  kHiddenGradients,  // likewise: the sums that go through the norm, and its gradients
};
inline constexpr size_t kExchangeKinds = 4;

constexpr absl::string_view Name(ExchangeKind kind) {
  constexpr std::array<absl::string_view, kExchangeKinds> kNames = {"sum_gradients", "spread_values",
                                                                    "row_statistics", "hidden_gradients"};
  return kNames[static_cast<size_t>(kind)];
}

// Since the start, with the wait for the other ranks; by kind.
using ExchangeTimes = std::array<absl::Duration, kExchangeKinds>;

class ExchangeClocks {
 public:
  BusyClock& of(ExchangeKind kind) { return clocks_[static_cast<size_t>(kind)]; }
  // Counts until the result ends.
  [[nodiscard]] auto During(ExchangeKind kind) {
    of(kind).Begin();
    return absl::MakeCleanup([this, kind] { of(kind).End(); });
  }
  ExchangeTimes Totals() const {
    ExchangeTimes totals;
    for (size_t i = 0; i < kExchangeKinds; ++i) totals[i] = clocks_[i].Total();
    return totals;
  }

 private:
  std::array<BusyClock, kExchangeKinds> clocks_;
};

// Replicas whose exchanges are counted.
class TimedReplicas final : public Replicas {
 public:
  // `clocks` outlive the object.
  TimedReplicas(std::unique_ptr<Replicas> replicas, ExchangeClocks* clocks)
      : replicas_(std::move(replicas)), clocks_(clocks) {}

  absl::Status SumGradients() override {
    const auto counting = clocks_->During(ExchangeKind::kSumGradients);
    return replicas_->SumGradients();
  }
  absl::Status SpreadValues() override {
    const auto counting = clocks_->During(ExchangeKind::kSpreadValues);
    return replicas_->SpreadValues();
  }

 private:
  const std::unique_ptr<Replicas> replicas_;
  ExchangeClocks* const clocks_;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_EXCHANGE_TIMES_H_
