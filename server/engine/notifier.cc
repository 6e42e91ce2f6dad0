// SPDX-License-Identifier: Apache-2.0
#include "server/engine/notifier.h"

#include <utility>

namespace lossd::engine {
namespace {

void CallAll(std::deque<Notifier::Event> events) {
  for (Notifier::Event& event : events) {
    event();
    event = nullptr;
  }
}

}  // namespace

Notifier::Notifier(Runtime* runtime) : join_(runtime->Start(this)) {}

Notifier::~Notifier() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    news_ = true;
    posted_.Signal();
  }
  join_();
}

void Notifier::Post(Event event) {
  absl::MutexLock lock(&mutex_);
  events_.push_back(std::move(event));
  news_ = true;
  posted_.Signal();
}

std::deque<Notifier::Event> Notifier::TakeQueued() {
  news_ = false;
  return std::exchange(events_, {});
}

void Notifier::Run() {
  while (true) {
    std::deque<Event> batch;
    {
      absl::MutexLock lock(&mutex_);
      while (events_.empty() && !stopping_) posted_.Wait(&mutex_);
      if (events_.empty()) return;
      batch = TakeQueued();
    }
    CallAll(std::move(batch));
  }
}

Runtime::Loop::Progress Notifier::RunSome() {
  std::deque<Event> batch;
  {
    absl::MutexLock lock(&mutex_);
    batch = TakeQueued();
    if (batch.empty()) return stopping_ ? Progress::kEnded : Progress::kIdle;
  }
  CallAll(std::move(batch));
  return Progress::kWorked;
}

bool Notifier::HasNews() {
  absl::MutexLock lock(&mutex_);
  return news_;
}

}  // namespace lossd::engine
