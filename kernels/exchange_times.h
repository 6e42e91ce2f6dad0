// SPDX-License-Identifier: Apache-2.0
// Measures how long a device exchanges data with other ranks or other devices of its process. ExchangeClocks
// has the times of one device, by kind of exchange. MemberExchanges has the clocks of all devices of a
// process. TimedReplicas measures the exchanges of a step.
//
// BusyClock, ExchangeClocks and MemberExchanges are thread-safe. TimedReplicas has the thread rules of the
// Replicas that it wraps.
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

// Measures for how long at least one of several activities has been under way.
class BusyClock {
 public:
  using Clock = std::chrono::steady_clock;
  // An activity begins. Tests set `now`.
  void Begin(Clock::time_point now = Clock::now()) {
    absl::MutexLock lock(&mutex_);
    if (under_way_++ == 0) since_ = now;
  }
  // An activity that began with Begin ends.
  void End(Clock::time_point now = Clock::now()) {
    absl::MutexLock lock(&mutex_);
    if (--under_way_ == 0) total_ += now - since_;
  }
  // Adds an activity that has ended and took `time`. No other activity may have been under way during that
  // time.
  void Add(Clock::duration time) {
    absl::MutexLock lock(&mutex_);
    total_ += time;
  }
  // The time so far; activities under way count until now.
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
  // Counts the time until the result is destroyed.
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
  // All clocks, in the order of the members.
  std::vector<ExchangeClocks*> All() {
    std::vector<ExchangeClocks*> all;
    for (ExchangeClocks& clocks : clocks_) all.push_back(&clocks);
    return all;
  }

 private:
  std::vector<ExchangeClocks> clocks_;
};

// Wraps Replicas and measures their exchanges.
class TimedReplicas final : public Replicas {
 public:
  // `clocks`: of all devices that take part in an exchange; they outlive the object.
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
