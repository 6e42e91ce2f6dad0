// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/call_registry.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/clocks/clock.h"
#include "server/access/authority.h"

namespace lossd::rpc {

using engine::FairShare;

CallRegistry::CallRegistry(const CallRegistryOptions& options)
    : options_(options), shares_(options.max_calls, options.peer_share), watchdog_([this] { Watch(); }) {}

CallRegistry::~CallRegistry() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  watchdog_.join();
}

absl::Status CallRegistry::Add(WatchedCall* call, const std::string& peer) {
  absl::MutexLock lock(&mutex_);
  FairShare::Answer answer = shares_.Take(peer, 1);
  if (answer == FairShare::Answer::kFull && MakeRoom(peer)) answer = shares_.Take(peer, 1);
  if (answer == FairShare::Answer::kYes) {
    calls_.emplace(call, Entry{peer, next_number_++});
    return absl::OkStatus();
  }
  options_.on_limit(answer == FairShare::Answer::kFull ? options_.flag : "peer_share");
  return Refusal(answer, peer);
}

bool CallRegistry::MakeRoom(const std::string& peer) {
  if (!options_.end_oldest || calls_.empty() || shares_.held(peer) > 0) return false;
  const auto oldest = std::min_element(calls_.begin(), calls_.end(), [](const auto& a, const auto& b) {
    return a.second.number < b.second.number;
  });
  options_.on_limit(options_.flag);
  oldest->first->GiveUpPlace(absl::ResourceExhaustedError(
      absl::StrCat("the call waited for its client, and another client has its place: ", shares_.used(),
                   " calls of this kind are open, the most allowed (--", options_.flag, ")")));
  shares_.Give(oldest->second.peer, 1);
  calls_.erase(oldest);
  return true;
}

absl::Status CallRegistry::Refusal(FairShare::Answer answer, const std::string& peer) const {
  if (answer == FairShare::Answer::kFull) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "too many open calls: ", shares_.used(), " of this kind, the most allowed (--", options_.flag, ")"));
  }
  return absl::ResourceExhaustedError(absl::StrCat(
      "too many open calls: ", peer, " has ", shares_.held(peer), " of ", shares_.used(),
      " of this kind, of ", shares_.capacity(), " that are allowed; one more would be beyond its share (--",
      options_.flag, ", --peer_share)"));
}

void CallRegistry::Remove(WatchedCall* call) {
  absl::MutexLock lock(&mutex_);
  const auto it = calls_.find(call);
  if (it == calls_.end()) return;
  shares_.Give(it->second.peer, 1);
  calls_.erase(it);
}

void CallRegistry::EndAll(const absl::Status& why) {
  absl::MutexLock lock(&mutex_);
  for (const auto& [call, entry] : calls_) call->EndWith(why);
}

void CallRegistry::ForEach(
    absl::FunctionRef<void(WatchedCall& call, const std::string& peer, uint64_t number)> look) {
  absl::MutexLock lock(&mutex_);
  std::vector<std::pair<uint64_t, WatchedCall*>> by_number;
  by_number.reserve(calls_.size());
  for (const auto& [call, entry] : calls_) by_number.emplace_back(entry.number, call);
  std::sort(by_number.begin(), by_number.end());
  for (const auto& [number, call] : by_number) look(*call, calls_.at(call).peer, number);
}

bool CallRegistry::WaitUntilEmpty(absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  return clocks::AwaitUntil(mutex_, absl::Condition(this, &CallRegistry::Empty), deadline);
}

void CallRegistry::Watch() {
  const CallTimeouts& timeouts = options_.timeouts;
  const absl::Duration shortest = std::min({timeouts.open, timeouts.idle, timeouts.turn, timeouts.send});
  const absl::Duration pause = std::clamp(shortest / 8, absl::Milliseconds(10), absl::Seconds(1));
  absl::MutexLock lock(&mutex_);
  while (!clocks::AwaitFor(mutex_, absl::Condition(&stopping_), pause)) {
    const absl::Time now = clocks::SteadyNow();
    const absl::Time date = clocks::WallNow();  // which certificates end by
    for (const auto& [call, entry] : calls_) {
      const absl::string_view limit = call->EndIfLate(now, timeouts);
      if (!limit.empty()) options_.on_limit(limit);
      if (date > call->until()) call->EndWith(access::CertificateHasExpired());
    }
  }
}

}  // namespace lossd::rpc
