// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/connection_chooser.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace lossd::client::internal {
namespace {

// A round has at least so much payload, and is as long as that.
constexpr uint64_t kRoundBytes = uint64_t{64} << 20;
constexpr absl::Duration kRoundTime = absl::Milliseconds(200);
// One that takes longer says nothing: something else is slow.
constexpr absl::Duration kLongestRound = absl::Seconds(30);
// Connections are busy if each of them has a stream for this part of the time.
constexpr double kBusy = 0.9;
constexpr double kGain = 1.1;  // by which one more has to move more
// Rounds between trials: twice as many after each one in a row that fails.
constexpr int kFirstRest = 8;
constexpr int kLongestRest = 512;

}  // namespace

void ConnectionChooser::Advance(absl::Time now) {
  if (under_way_ > 0) {
    round_.busy += now - last_;
    round_.streams_busy += under_way_ * (now - last_);
  }
  last_ = now;
}

void ConnectionChooser::Begin(absl::Time now) {
  Advance(now);
  ++under_way_;
}

ConnectionChooser::Advice ConnectionChooser::End(uint64_t moved, absl::Time now) {
  Advance(now);
  --under_way_;
  const Round round = round_;
  const uint64_t bytes = moved - round.moved_before;
  if (round.busy > kLongestRound) {
    round_ = {.moved_before = moved};
    return Advice::kStay;
  }
  if (opening_ || bytes < kRoundBytes || round.busy < kRoundTime) return Advice::kStay;
  round_ = {.moved_before = moved};
  if (!trying_ && round.streams_busy < kBusy * count_ * round.busy) return Advice::kStay;
  return Decide(static_cast<double>(bytes) / absl::ToDoubleSeconds(round.busy));
}

ConnectionChooser::Advice ConnectionChooser::Decide(double rate) {
  if (trying_) {
    trying_ = false;
    const std::string compared =
        absl::StrFormat("%d moved %.2f GB/s, %d moved %.2f", count_ - 1, before_ / 1e9, count_, rate / 1e9);
    reason_ = compared;
    if (rate < kGain * before_) {
      --count_;
      Rest();
      return Advice::kDrop;
    }
    failures_ = 0;
  }
  if (count_ == kMost) return Advice::kStay;
  if (rest_ > 0) {
    --rest_;
    return Advice::kStay;
  }
  before_ = rate;
  opening_ = true;
  return Advice::kAdd;
}

void ConnectionChooser::Rest() {
  rest_ = std::min(kFirstRest << std::min(failures_, 16), kLongestRest);
  ++failures_;
}

void ConnectionChooser::Added(uint64_t moved) {
  opening_ = false;
  trying_ = true;
  ++count_;
  round_ = {.moved_before = moved};
}

void ConnectionChooser::Refused(absl::string_view why, uint64_t moved) {
  opening_ = false;
  reason_ = absl::StrCat("no further connection came about: ", why);
  Rest();
  round_ = {.moved_before = moved};
}

}  // namespace lossd::client::internal
