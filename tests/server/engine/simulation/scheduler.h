// SPDX-License-Identifier: Apache-2.0
// Scheduler: decides which of the simulation's tasks runs, one at a time, by a seed. The same seed gives the
// same run. A task is a fiber that runs until it waits or yields.
//
// The engine uses it as its Runtime: the scheduler runs the engine's loops as tasks, makes callers that block
// wait as tasks, and has a clock that advances by a millisecond in each turn. So a simulation can find every
// schedule that switches tasks where the engine calls out (to the device, observers and copy functions),
// where it waits, and between the turns of its loops. The engine holds no lock at these places.
#ifndef LOSSD_TESTS_SERVER_ENGINE_SIMULATION_SCHEDULER_H_
#define LOSSD_TESTS_SERVER_ENGINE_SIMULATION_SCHEDULER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "server/engine/device_loop.h"

namespace lossd::engine::simulation {

// A function with a stack of its own that can give up control and later continue at the same place. In the
// simulation it is what a thread is otherwise. A switch takes less than a microsecond. Not thread-safe: all
// fibers of a process belong to one thread.
class Fiber {
 public:
  // `body` runs in parts, in calls of Resume.
  explicit Fiber(std::function<void()> body);
  // If the fiber has not ended, its stack and the objects on it are never freed.
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Runs the body until it calls Suspend or ends. Must not be called from a fiber.
  void Resume();
  // Returns to the caller of Resume. Must be called from the body.
  void Suspend();
  bool ended() const { return ended_; }

 private:
  struct Stack;
  static void Enter(unsigned low, unsigned high);
  void SwitchTo(bool inside);

  std::function<void()> body_;
  std::unique_ptr<Stack> stack_;
  bool started_ = false;
  bool ended_ = false;
};

class Scheduler final : public Runtime {
 public:
  using Condition = std::function<bool()>;

  explicit Scheduler(uint64_t seed) : random_(seed) {}

  // ---- Tasks ----
  void Spawn(std::string name, std::function<void()> body);
  // Called by a task. May let other tasks run first.
  void Yield();
  // Called by a task. Returns when `condition` is true; `condition` must not change anything. `what`
  // describes for people what the task waits for.
  void WaitUntil(std::string what, Condition condition);

  // Runs tasks until none can run, `max_turns` turns have passed, or Stop was called. True if all tasks have
  // ended.
  bool Run(int64_t max_turns);
  void Stop() { stopped_ = true; }
  // One line for each task that has not ended: what it waits for.
  std::string DescribeWaiting() const;

  // ---- Chance ----
  // A random number in [0, below).
  uint64_t Draw(uint64_t below) { return below == 0 ? 0 : random_() % below; }
  // The number of turns so far, which is the time of the simulation.
  int64_t turns() const { return turns_; }
  bool out_of_turns() const { return out_of_turns_; }

  // ---- Runtime ----
  absl::AnyInvocable<void()> Start(Loop* loop) override;
  void Wait(const absl::Notification& done) override;
  bool MayHelp() override { return Draw(2) == 0; }
  absl::Time Now() override { return absl::UnixEpoch() + absl::Milliseconds(turns_); }
  absl::Time WallNow() override { return Now(); }

 private:
  struct Task {
    std::string name;
    std::unique_ptr<Fiber> fiber;
    Condition condition;  // null: the task can run
    std::string waits_for;
    uint64_t weight = 1;  // how often the task is chosen: some tasks are slow, some fast
  };

  Task* Pick();
  void Block(std::string what, Condition condition);

  std::mt19937_64 random_;
  std::vector<std::unique_ptr<Task>> tasks_;
  Task* current_ = nullptr;
  int64_t turns_ = 0;
  int loops_ = 0;
  bool out_of_turns_ = false;
  bool stopped_ = false;
};

}  // namespace lossd::engine::simulation

#endif  // LOSSD_TESTS_SERVER_ENGINE_SIMULATION_SCHEDULER_H_
