// SPDX-License-Identifier: Apache-2.0
// How long a device is in its exchanges with others, ranks or devices of one process, by what is exchanged.
//
// ExchangeClocks and MemberExchanges are thread-safe.
#ifndef LOSSD_KERNELS_EXCHANGE_TIMES_H_
#define LOSSD_KERNELS_EXCHANGE_TIMES_H_

#include <array>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
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

// Since the start, with the wait for the others; by kind.
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

// Of the devices of one process that share heads.
class MemberExchanges {
 public:
  explicit MemberExchanges(int members) : clocks_(static_cast<size_t>(members)) {}
  ExchangeClocks& of(int member) { return clocks_[static_cast<size_t>(member)]; }
  ExchangeTimes Totals(int member) const { return clocks_[static_cast<size_t>(member)].Totals(); }
  // In order.
  std::vector<ExchangeClocks*> All() {
    std::vector<ExchangeClocks*> all;
    for (ExchangeClocks& clocks : clocks_) all.push_back(&clocks);
    return all;
  }

 private:
  std::vector<ExchangeClocks> clocks_;
};

// Replicas whose exchanges are counted.
class TimedReplicas final : public Replicas {
 public:
  // `clocks`: of those that exchange at once; they outlive the object.
  TimedReplicas(std::unique_ptr<Replicas> replicas, std::vector<ExchangeClocks*> clocks)
      : replicas_(std::move(replicas)), clocks_(std::move(clocks)) {}

  absl::Status SumGradients() override {
    return Count(ExchangeKind::kSumGradients, [&] { return replicas_->SumGradients(); });
  }
  absl::Status SpreadValues() override {
    return Count(ExchangeKind::kSpreadValues, [&] { return replicas_->SpreadValues(); });
  }

 private:
  absl::Status Count(ExchangeKind kind, absl::FunctionRef<absl::Status()> exchange) const {
    for (ExchangeClocks* const clocks : clocks_) clocks->of(kind).Begin();
    absl::Status status = exchange();
    for (ExchangeClocks* const clocks : clocks_) clocks->of(kind).End();
    return status;
  }

  const std::unique_ptr<Replicas> replicas_;
  const std::vector<ExchangeClocks*> clocks_;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_EXCHANGE_TIMES_H_
