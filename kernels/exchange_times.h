// SPDX-License-Identifier: Apache-2.0
// How long a device exchanges data with others, with ranks or with devices of its process. ExchangeClocks
// counts the time of one device by what is exchanged, MemberExchanges that of all devices of a process, and
// TimedReplicas the time of the exchanges of a step.
//
// BusyClock, ExchangeClocks and MemberExchanges are thread-safe; TimedReplicas is driven as the Replicas that
// it wraps.
#ifndef LOSSD_KERNELS_EXCHANGE_TIMES_H_
#define LOSSD_KERNELS_EXCHANGE_TIMES_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/backend.h"

namespace lossd::kernels {

// How long at least one of several things has been under way.
class BusyClock {
 public:
  using Clock = std::chrono::steady_clock;
  // `now`: of the clock, for tests.
  void Begin(Clock::time_point now = Clock::now()) {
    absl::MutexLock lock(&mutex_);
    if (under_way_++ == 0) since_ = now;
  }
  // After a Begin.
  void End(Clock::time_point now = Clock::now()) {
    absl::MutexLock lock(&mutex_);
    if (--under_way_ == 0) total_ += now - since_;
  }
  // What has taken `time`, and is over; at no time when something else was under way.
  void Add(Clock::duration time) {
    absl::MutexLock lock(&mutex_);
    total_ += time;
  }
  // What is under way counts until now.
  absl::Duration Total(Clock::time_point now = Clock::now()) const {
    absl::MutexLock lock(&mutex_);
    return absl::FromChrono(under_way_ == 0 ? total_ : total_ + (now - since_));
  }

 private:
  mutable absl::Mutex mutex_;
  int under_way_ ABSL_GUARDED_BY(mutex_) = 0;
  Clock::time_point since_ ABSL_GUARDED_BY(mutex_);
  Clock::duration total_ ABSL_GUARDED_BY(mutex_) = Clock::duration::zero();
};

// The clocks of one device, one for each kind of exchange.
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

// The clocks of the devices of one process that share heads.
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
