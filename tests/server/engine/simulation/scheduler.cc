// SPDX-License-Identifier: Apache-2.0
#include "tests/server/engine/simulation/scheduler.h"

#include <array>
#include <utility>

#include "absl/strings/str_cat.h"

namespace lossd::engine::simulation {

void Scheduler::Spawn(std::string name, std::function<void()> body) {
  static constexpr std::array<uint64_t, 6> kWeights = {1, 8, 8, 8, 64, 256};
  auto task = std::make_unique<Task>();
  task->name = std::move(name);
  task->fiber = std::make_unique<Fiber>(std::move(body));
  task->weight = kWeights[Draw(kWeights.size())];
  tasks_.push_back(std::move(task));
}

void Scheduler::Yield() {
  if (current_ != nullptr && Draw(2) == 0) Block("its turn", nullptr);
}

void Scheduler::WaitUntil(std::string what, Condition condition) {
  if (!condition()) Block(std::move(what), std::move(condition));
}

void Scheduler::Block(std::string what, Condition condition) {
  Task& task = *current_;
  task.waits_for = std::move(what);
  task.condition = std::move(condition);
  task.fiber->Suspend();
}

Scheduler::Task* Scheduler::Pick() {
  uint64_t sum = 0;
  std::vector<Task*> ready;
  for (const auto& task : tasks_) {
    if (task->condition != nullptr && !task->condition()) continue;
    ready.push_back(task.get());
    sum += task->weight;
  }
  uint64_t at = Draw(sum);
  for (Task* task : ready) {
    if (at < task->weight) return task;
    at -= task->weight;
  }
  return nullptr;
}

bool Scheduler::Run(int64_t max_turns) {
  while (!stopped_) {
    Task* const task = Pick();
    if (task == nullptr) break;
    if (++turns_ > max_turns) {
      out_of_turns_ = true;
      return false;
    }
    task->condition = nullptr;
    task->waits_for.clear();
    current_ = task;
    task->fiber->Resume();
    current_ = nullptr;
    if (task->fiber->ended()) std::erase_if(tasks_, [task](const auto& t) { return t.get() == task; });
  }
  return tasks_.empty();
}

std::string Scheduler::DescribeWaiting() const {
  std::string text;
  for (const auto& task : tasks_) absl::StrAppend(&text, "  ", task->name, ": ", task->waits_for, "\n");
  return text;
}

absl::AnyInvocable<void()> Scheduler::Start(Loop* loop) {
  auto ended = std::make_shared<bool>(false);
  Spawn(absl::StrCat("loop ", loops_++ == 0 ? "notifier" : "device"), [this, loop, ended] {
    while (true) {
      const Loop::Progress progress = loop->RunSome();
      if (progress == Loop::Progress::kEnded) break;
      if (progress == Loop::Progress::kWorked) Yield();
      if (progress == Loop::Progress::kIdle) WaitUntil("work", [loop] { return loop->HasNews(); });
    }
    *ended = true;
  });
  return [this, ended] { WaitUntil("the end of a loop", [ended] { return *ended; }); };
}

void Scheduler::Wait(const absl::Notification& done) {
  WaitUntil("an operation on the device", [&done] { return done.HasBeenNotified(); });
}

}  // namespace lossd::engine::simulation
