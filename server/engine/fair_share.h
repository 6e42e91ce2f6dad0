// SPDX-License-Identifier: Apache-2.0
// How a resource is shared between those that hold parts of it, for example peers or heads. The rule:
//
//   A holder that has something may take more only as long as it then has at most `share` of the capacity,
//   and at most as much as is left to all others. A holder that has nothing may take whatever is free.
//
// So holders that only take, never give back, leave something for each one that comes later: with a share of
// a half, the first one gets a half, the next a quarter, and so on. (Dynamic thresholds, as in the shared
// buffers of switches.)
//
// Memory: an entry for each holder that has something. Thread-compatible.
#ifndef LOSSD_SERVER_ENGINE_FAIR_SHARE_H_
#define LOSSD_SERVER_ENGINE_FAIR_SHARE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "absl/strings/string_view.h"

namespace lossd::engine {

class FairShare {
 public:
  // `share` in (0, 1]; 1: a holder may take all there is.
  FairShare(int64_t capacity, double share) : capacity_(capacity), share_(share) {}

  enum class Answer : uint8_t {
    kYes,
    kFull,       // there is not so much left for any holder
    kOverShare,  // this holder has its share
  };
  // Whether `holder` may take `amount` >= 0 more. The holder "" has no share: it may take what is free.
  Answer Check(absl::string_view holder, int64_t amount) const;
  // The same; kYes: it has taken them.
  Answer Take(absl::string_view holder, int64_t amount);
  // Gives back some of what was taken.
  void Give(absl::string_view holder, int64_t amount);

  int64_t capacity() const { return capacity_; }
  int64_t used() const { return used_; }
  int64_t held(absl::string_view holder) const;
  // Only those that have something, so that strangers who come and go leave nothing behind; for tests.
  int64_t holders() const { return static_cast<int64_t>(held_.size()); }

 private:
  const int64_t capacity_;
  const double share_;
  int64_t used_ = 0;
  std::map<std::string, int64_t, std::less<>> held_;  // not 0
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_FAIR_SHARE_H_
