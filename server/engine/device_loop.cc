// SPDX-License-Identifier: Apache-2.0
// The loops of the device thread and of the notifier, and the runtime of a server (device_loop.h).
#include "server/engine/device_loop.h"

#include <pthread.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/synchronization/notification.h"
#include "kernels/clocks/clock.h"
#include "server/engine/engine_options.h"

namespace lossd::engine {
namespace {

class ThreadsAndClock final : public Runtime {
 public:
  absl::AnyInvocable<void()> Start(Loop* loop) override {
    return [thread = std::thread([loop] { loop->Run(); })]() mutable { thread.join(); };
  }
  void Wait(const absl::Notification& done) override { done.WaitForNotification(); }
  bool MayHelp() override { return true; }
  absl::Time Now() override { return clocks::SteadyNow(); }
  absl::Time WallNow() override { return clocks::WallNow(); }
};

}  // namespace

Runtime* SystemRuntime() {
  static ThreadsAndClock runtime;
  return &runtime;
}

// ---- DeviceLoop ----

DeviceLoop::DeviceLoop(absl::Mutex* mutex, int max_chunks, Runtime* runtime)
    : mutex_(mutex), runtime_(runtime), load_{.max_chunks = max_chunks}, counted_(runtime->Now()) {}

DeviceLoop::~DeviceLoop() = default;

void DeviceLoop::Start() { join_ = runtime_->Start(this); }

void DeviceLoop::Join() { join_(); }

void DeviceLoop::Signal() {
  news_ = true;
  wake_.Signal();
}

absl::Status DeviceLoop::Run(absl::FunctionRef<void()> task) {
  absl::Notification done;
  {
    absl::MutexLock lock(mutex_);
    if (stopping_) return absl::UnavailableError("the server is shutting down");
    tasks_.emplace_back([&] {
      task();
      done.Notify();
    });
    Signal();
  }
  runtime_->Wait(done);
  return absl::OkStatus();
}

void DeviceLoop::Add(std::string name, std::shared_ptr<Source> source) {
  mutex_->AssertHeld();
  sources_.emplace(std::move(name), Entry{.source = std::move(source)});
}

void DeviceLoop::Remove(absl::string_view name) {
  mutex_->AssertHeld();
  if (const auto it = sources_.find(name); it != sources_.end()) sources_.erase(it);
}

void DeviceLoop::Wake() {
  mutex_->AssertHeld();
  Signal();
}

void DeviceLoop::Stop(Work last) {
  mutex_->AssertHeld();
  stopping_ = true;
  last_ = std::move(last);
  Signal();
}

bool DeviceLoop::stopping() const {
  mutex_->AssertHeld();
  return stopping_;
}

void DeviceLoop::OnLaunched(bool accumulates) {
  mutex_->AssertHeld();
  CountTime();
  ++load_.chunks;
  if (accumulates) ++load_.without_results;
}

void DeviceLoop::OnResults(bool accumulates) {
  mutex_->AssertHeld();
  if (accumulates) --load_.without_results;
  Signal();  // a chunk that waits for this one's results may be formed
}

void DeviceLoop::OnLeft() {
  mutex_->AssertHeld();
  CountTime();
  --load_.chunks;
  heartbeat_.Beat();
  Signal();
}

const DeviceLoad& DeviceLoop::load() const {
  mutex_->AssertHeld();
  return load_;
}

absl::Duration DeviceLoop::BusyTime() const {
  mutex_->AssertHeld();
  const bool busy = works_ || load_.chunks > 0;
  return busy_ + (busy ? std::max(runtime_->Now() - counted_, absl::ZeroDuration()) : absl::ZeroDuration());
}

void DeviceLoop::CountTime() {
  busy_ = BusyTime();
  counted_ = runtime_->Now();
}

void DeviceLoop::Run() {
  pthread_setname_np(pthread_self(), "lossd-device");
  thread_ = std::this_thread::get_id();
  absl::MutexLock lock(mutex_);
  while (true) {
    const Progress progress = RunNext();
    if (progress == Progress::kEnded) return;
    if (progress == Progress::kIdle) clocks::WaitFor(wake_, *mutex_, kDeviceBeat);
  }
}

Runtime::Loop::Progress DeviceLoop::RunSome() {
  absl::MutexLock lock(mutex_);
  return RunNext();
}

bool DeviceLoop::HasNews() {
  absl::MutexLock lock(mutex_);
  return news_;
}

Runtime::Loop::Progress DeviceLoop::RunNext() {
  Work work = NextWork();
  const bool found = static_cast<bool>(work);
  if (found) {
    CountTime();
    works_ = true;
    {
      MutexUnlock unlock(mutex_);
      work();
      work = nullptr;  // destroys what the closure owns, without the lock
    }
    CountTime();
    works_ = false;
  }
  if (found || load_.chunks == 0) heartbeat_.Beat();  // while chunks are on the device, OnLeft beats
  if (found) return Progress::kWorked;
  news_ = false;
  if (!stopping_ || load_.chunks > 0) return Progress::kIdle;
  Work last = std::move(last_);
  {
    MutexUnlock unlock(mutex_);
    last();
  }
  sources_.clear();
  return Progress::kEnded;
}

DeviceLoop::Work DeviceLoop::NextWork() {
  if (!tasks_.empty()) {
    Work task = std::move(tasks_.front());
    tasks_.pop_front();
    return task;
  }
  const bool any_here = std::any_of(sources_.begin(), sources_.end(), [this](const auto& entry) {
    mutex_->AssertHeld();
    return entry.second.source->Values(load_) == ValuesAre::kHere;
  });
  if (any_here) {
    if (Work work = NextOfSources(/*passing=*/true)) return work;
  }
  return NextOfSources(/*passing=*/false);
}

DeviceLoop::Work DeviceLoop::NextOfSources(bool passing) {
  std::vector<Entry*> passed;
  // Begins with the source after the one that was served last, in the order of names.
  auto it = sources_.upper_bound(last_served_);
  for (size_t i = 0; i < sources_.size(); ++i, ++it) {
    if (it == sources_.end()) it = sources_.begin();
    Entry& entry = it->second;
    if (passing && entry.passed_over < kMostPassedOver && entry.source->Values(load_) == ValuesAre::kAway) {
      passed.push_back(&entry);
      continue;
    }
    if (Work work = entry.source->TakeWork(load_)) {
      entry.passed_over = 0;
      for (Entry* other : passed) ++other->passed_over;
      last_served_ = it->first;
      return work;
    }
  }
  return nullptr;
}

// ---- Notifier ----

Notifier::Notifier(Runtime* runtime) : runtime_(runtime), join_(runtime->Start(this)) {}

Notifier::~Notifier() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    news_ = true;
    changed_.SignalAll();
  }
  join_();
}

void Notifier::Post(Event event) {
  absl::MutexLock lock(&mutex_);
  events_.push_back(std::move(event));
  news_ = true;
  changed_.Signal();
}

void Notifier::RunQueued() {
  if (!runtime_->MayHelp()) return;
  absl::MutexLock lock(&mutex_);
  while (!running_ && !events_.empty()) RunBatch();
}

void Notifier::RunBatch() {
  news_ = false;
  running_ = true;
  std::deque<Event> batch = std::exchange(events_, {});
  {
    MutexUnlock unlock(&mutex_);
    for (Event& event : batch) {
      event();
      event = nullptr;
    }
  }
  running_ = false;
  if (stopping_) changed_.Signal();
}

void Notifier::Run() {
  absl::MutexLock lock(&mutex_);
  while (true) {
    while (running_ || (events_.empty() && !stopping_)) changed_.Wait(&mutex_);
    if (events_.empty()) return;
    RunBatch();
  }
}

Runtime::Loop::Progress Notifier::RunSome() {
  absl::MutexLock lock(&mutex_);
  if (running_) return Progress::kIdle;
  if (events_.empty()) {
    news_ = false;
    return stopping_ ? Progress::kEnded : Progress::kIdle;
  }
  RunBatch();
  return Progress::kWorked;
}

bool Notifier::HasNews() {
  absl::MutexLock lock(&mutex_);
  return news_ && !running_;
}

}  // namespace lossd::engine
