// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/call_inbox.h"

#include <optional>

#include "kernels/clocks/clock.h"

namespace lossd::rpc {

void CallInbox::OnMemory(absl::AnyInvocable<void()> receive) { Post(std::move(receive)); }

void CallInbox::OnSlice(engine::SliceOutput output) {
  Post(Slice{.output = std::move(output), .ready = clocks::SteadyNow()});
}

void CallInbox::OnFinished(absl::Status status, const engine::StreamSummary& summary) {
  Post(End{.status = std::move(status), .summary = summary});
}

void CallInbox::Post(Event event) {
  const bool quick = IsQuick(event);
  {
    absl::MutexLock lock(&mutex_);
    events_.push_back(std::move(event));
    if (std::exchange(turn_scheduled_, true)) return;
  }
  if (quick) {
    TakeQuickTurn();
  } else {
    ScheduleTurn();
  }
}

bool CallInbox::IsQuick(const Event& event) {
  if (auto* const slice = std::get_if<Slice>(&event)) return handler_->IsQuick(*slice);
  return std::holds_alternative<End>(event);
}

void CallInbox::ScheduleTurn() {
  auto turn = [self = shared_from_this()] { self->TakeTurn(); };
  if (!workers_->Schedule(turn)) turn();
}

void CallInbox::TakeQuickTurn() {
  while (true) {
    std::optional<Event> event;
    {
      absl::MutexLock lock(&mutex_);
      turn_scheduled_ = !events_.empty();
      if (events_.empty()) return;
      if (IsQuick(events_.front())) {
        event = std::move(events_.front());
        events_.pop_front();
      }
    }
    if (!event.has_value()) return ScheduleTurn();
    Deliver(*std::move(event));
  }
}

void CallInbox::TakeTurn() {
  while (true) {
    std::deque<Event> events;
    {
      absl::MutexLock lock(&mutex_);
      events.swap(events_);
      turn_scheduled_ = !events.empty();
    }
    if (events.empty()) return;
    for (Event& event : events) Deliver(std::move(event));
  }
}

void CallInbox::Deliver(Event event) {
  if (auto* const receive = std::get_if<absl::AnyInvocable<void()>>(&event)) {
    (*receive)();
  } else if (auto* const slice = std::get_if<Slice>(&event)) {
    handler_->Handle(std::move(*slice));
  } else {
    handler_->Handle(std::get<End>(std::move(event)));
  }
}

}  // namespace lossd::rpc
