// SPDX-License-Identifier: Apache-2.0
// Calls with one request, the registry of open calls, and statuses of ended calls (request_call.h).
#include "server/rpc/request_call.h"

#include <algorithm>
#include <vector>

#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"
#include "proto/wire/status_details.h"
#include "server/access/authority.h"
#include "server/messages/convert.h"

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
  FairShare::Answer answer = TakePlace(call, peer);
  if (answer == FairShare::Answer::kFull && MakeRoom(peer)) answer = TakePlace(call, peer);
  if (answer == FairShare::Answer::kYes) {
    calls_.emplace(call, Entry{peer, next_number_++});
    return absl::OkStatus();
  }
  options_.on_limit(answer == FairShare::Answer::kFull ? options_.flag : "peer_share");
  return Refusal(answer, peer);
}

FairShare::Answer CallRegistry::TakePlace(WatchedCall* call, const std::string& peer) {
  absl::MutexLock lock(&places_mutex_);
  const FairShare::Answer answer = shares_.Take(peer, 1);
  if (answer == FairShare::Answer::kYes) places_.emplace(call, peer);
  return answer;
}

void CallRegistry::GiveBack(WatchedCall* call) {
  absl::MutexLock lock(&places_mutex_);
  const auto it = places_.find(call);
  if (it == places_.end()) return;
  shares_.Give(it->second, 1);
  places_.erase(it);
}

bool CallRegistry::MakeRoom(const std::string& peer) {
  if (!options_.end_oldest) return false;
  auto oldest = calls_.end();
  int64_t used = 0;
  {
    absl::MutexLock lock(&places_mutex_);
    if (shares_.held(peer) > 0) return false;
    used = shares_.used();
    for (auto it = calls_.begin(); it != calls_.end(); ++it) {
      if (!places_.contains(it->first)) continue;
      if (oldest == calls_.end() || it->second.number < oldest->second.number) oldest = it;
    }
  }
  if (oldest == calls_.end()) return false;
  options_.on_limit(options_.flag);
  oldest->first->GiveUpPlace(absl::ResourceExhaustedError(
      absl::StrCat("the call waited for its client, and another client has its place: ", used,
                   " calls of this kind are open, the most allowed (--", options_.flag, ")")));
  GiveBack(oldest->first);
  calls_.erase(oldest);
  return true;
}

absl::Status CallRegistry::Refusal(FairShare::Answer answer, const std::string& peer) {
  absl::MutexLock lock(&places_mutex_);
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
  GiveBack(call);
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
    const absl::Time date = clocks::WallNow();  // certificates expire by the wall clock
    for (const auto& [call, entry] : calls_) {
      const absl::string_view limit = call->EndIfLate(now, timeouts);
      if (!limit.empty()) options_.on_limit(limit);
      if (date > call->until()) call->EndWith(access::CertificateHasExpired());
    }
  }
}

grpc::Status Failed(const RequestEnvironment& environment, absl::string_view method, absl::Status status) {
  return CountedEnd(method, std::move(status), environment.incarnation, environment.metrics);
}

absl::Status RequestCall::Register() {
  LOSSD_TRY(const std::string identity, environment_->access->Identify(*context_, method_));
  return environment_->requests->Add(&waiting_, PeerKey(*context_, identity));
}

void RequestCall::Receive() {
  {
    absl::MutexLock lock(&mutex_);
    clock_.Set(CallClock::Waits::kOpen);
  }
  environment_->metrics->CountRequest(method_);
  if (absl::Status admitted = Register(); !admitted.ok()) {
    return Finish(Failed(*environment_, method_, std::move(admitted)));
  }
  absl::MutexLock lock(&mutex_);
  if (ended_) return;  // EndWaiting has ended it already: another call got its place, or the request is late
  StartRead(&request_);
}

void RequestCall::OnReadDone(bool ok) {
  environment_->requests->Remove(&waiting_);
  {
    absl::MutexLock lock(&mutex_);
    if (ended_) return;
    clock_.Set(CallClock::Waits::kNothing);
  }
  if (ok) return OnRequest(request_);
  absl::Status why = context_->IsCancelled()
                         ? absl::CancelledError("the client cancelled the call or went away")
                         : errors::FieldError("request", "come before the half-close", "nothing");
  Finish(Failed(*environment_, method_, std::move(why)));
}

void RequestCall::EndWaiting(absl::Status why) {
  {
    absl::MutexLock lock(&mutex_);
    if (clock_.what() != CallClock::Waits::kOpen) return;
    clock_.Set(CallClock::Waits::kNothing);
    ended_ = true;
  }
  Finish(Failed(*environment_, method_, std::move(why)));
}

absl::string_view RequestCall::EndIfRequestIsLate(absl::Time now, const CallTimeouts& timeouts) {
  absl::string_view limit;
  absl::Status late;
  {
    absl::MutexLock lock(&mutex_);
    late = clock_.Check(now, timeouts, &limit);
  }
  if (late.ok()) return "";
  EndWaiting(std::move(late));
  return limit;
}

UnaryCall* UnaryCall::Start(const RequestEnvironment* environment, grpc::CallbackServerContext* context,
                            absl::string_view method, Handler handler) {
  auto* const call = new UnaryCall(environment, context, method, std::move(handler));
  call->Receive();
  return call;
}

void UnaryCall::Answer(const grpc::ByteBuffer& answer) {
  answer_ = answer;
  StartWriteAndFinish(&answer_, {}, grpc::Status::OK);
}

grpc::Status ToGrpc(absl::Status status, uint64_t incarnation) {
  if (status.ok()) return grpc::Status::OK;
  return wire::ToGrpcStatus(messages::WithDetail(std::move(status), incarnation));
}

grpc::Status CountedEnd(absl::string_view method, absl::Status status, uint64_t incarnation,
                        metrics::Metrics* metrics) {
  const std::string limit = engine::LimitOf(status);
  grpc::Status result = ToGrpc(std::move(status), incarnation);
  if (!result.ok()) metrics->CountError(method, CodeName(result));
  if (!limit.empty()) metrics->CountLimit(limit);
  return result;
}

std::string CodeName(const grpc::Status& status) {
  return absl::StatusCodeToString(static_cast<absl::StatusCode>(status.error_code()));
}

}  // namespace lossd::rpc
