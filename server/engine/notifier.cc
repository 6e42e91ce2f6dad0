#include "server/engine/notifier.h"

#include <utility>

namespace lossd::engine {

Notifier::Notifier() : thread_([this] { Run(); }) {}

Notifier::~Notifier() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    posted_.Signal();
  }
  thread_.join();
}

void Notifier::Post(Event event) {
  absl::MutexLock lock(&mutex_);
  events_.push_back(std::move(event));
  posted_.Signal();
}

void Notifier::Run() {
  while (true) {
    std::deque<Event> batch;
    {
      absl::MutexLock lock(&mutex_);
      while (events_.empty() && !stopping_) posted_.Wait(&mutex_);
      if (events_.empty()) return;
      batch.swap(events_);
    }
    for (Event& event : batch) {
      event();
      event = nullptr;
    }
  }
}

}  // namespace lossd::engine
