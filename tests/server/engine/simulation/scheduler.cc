// SPDX-License-Identifier: Apache-2.0
#include "tests/server/engine/simulation/scheduler.h"

#include <ucontext.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#if defined(__SANITIZE_ADDRESS__)
#define LOSSD_FIBER_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define LOSSD_FIBER_ASAN 1
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define LOSSD_FIBER_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define LOSSD_FIBER_TSAN 1
#endif
#endif

#ifdef LOSSD_FIBER_ASAN
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef LOSSD_FIBER_TSAN
#include <sanitizer/tsan_interface.h>
#endif

namespace lossd::engine::simulation {
namespace {

constexpr size_t kStackBytes = 256 << 10;

// Memory of stacks that are not in use.
std::vector<std::unique_ptr<char[]>>& FreeStacks() {
  static std::vector<std::unique_ptr<char[]>> stacks;
  return stacks;
}

std::unique_ptr<char[]> TakeStack() {
  if (FreeStacks().empty()) return std::unique_ptr<char[]>(new char[kStackBytes]);  // not zeroed
  std::unique_ptr<char[]> memory = std::move(FreeStacks().back());
  FreeStacks().pop_back();
  return memory;
}

}  // namespace

// Both ends of the switch, and what the sanitizers want to know of them.
struct Fiber::Stack {
  std::unique_ptr<char[]> memory = TakeStack();
  ucontext_t inside, outside;
#ifdef LOSSD_FIBER_ASAN
  const void* outside_bottom = nullptr;
  size_t outside_bytes = 0;
#endif
#ifdef LOSSD_FIBER_TSAN
  void* inside_fiber = __tsan_create_fiber(0);
  void* outside_fiber = nullptr;
  ~Stack() { __tsan_destroy_fiber(inside_fiber); }
#endif
};

Fiber::Fiber(std::function<void()> body) : body_(std::move(body)), stack_(std::make_unique<Stack>()) {}

Fiber::~Fiber() {
  if (started_ && !ended_) {
    (void)stack_.release();
    return;
  }
  FreeStacks().push_back(std::move(stack_->memory));
}

void Fiber::Enter(unsigned low, unsigned high) {
  auto* const self = reinterpret_cast<Fiber*>((static_cast<uintptr_t>(high) << 32) | low);
#ifdef LOSSD_FIBER_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &self->stack_->outside_bottom, &self->stack_->outside_bytes);
#endif
  self->body_();
  self->body_ = nullptr;
  self->ended_ = true;
  self->SwitchTo(/*inside=*/false);
}

void Fiber::Resume() {
  if (!started_) {
    started_ = true;
    getcontext(&stack_->inside);
    stack_->inside.uc_stack.ss_sp = stack_->memory.get();
    stack_->inside.uc_stack.ss_size = kStackBytes;
    stack_->inside.uc_link = nullptr;
    const auto address = reinterpret_cast<uintptr_t>(this);
    makecontext(&stack_->inside, reinterpret_cast<void (*)()>(&Fiber::Enter), 2,
                static_cast<unsigned>(address), static_cast<unsigned>(address >> 32));
  }
  SwitchTo(/*inside=*/true);
}

void Fiber::Suspend() { SwitchTo(/*inside=*/false); }

void Fiber::SwitchTo(bool inside) {
#ifdef LOSSD_FIBER_ASAN
  void* fake_stack = nullptr;
  if (inside) {
    __sanitizer_start_switch_fiber(&fake_stack, stack_->memory.get(), kStackBytes);
  } else {
    __sanitizer_start_switch_fiber(ended_ ? nullptr : &fake_stack, stack_->outside_bottom,
                                   stack_->outside_bytes);
  }
#endif
#ifdef LOSSD_FIBER_TSAN
  if (inside) stack_->outside_fiber = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(inside ? stack_->inside_fiber : stack_->outside_fiber, 0);
#endif
  swapcontext(inside ? &stack_->outside : &stack_->inside, inside ? &stack_->inside : &stack_->outside);
#ifdef LOSSD_FIBER_ASAN
  if (inside) {
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
  } else {
    __sanitizer_finish_switch_fiber(fake_stack, &stack_->outside_bottom, &stack_->outside_bytes);
  }
#endif
}

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
