// SPDX-License-Identifier: Apache-2.0
#include "tests/server/engine/simulation/fiber.h"

#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

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

}  // namespace lossd::engine::simulation
