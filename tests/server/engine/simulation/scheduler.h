// SPDX-License-Identifier: Apache-2.0
// Decides which of the simulation's tasks goes on, one at a time, by a seed: the same seed gives the same
// run. A task is a fiber; it goes on until it waits or yields.
//
// As Runtime it runs the engine's loops as tasks, lets callers that block wait as tasks, and has a clock that
// advances by a millisecond a turn. So it finds every schedule whose switches are at the engine's calls out
// (of the device, observers, copy functions), at waits and between the turns of its loops. The engine holds
// no lock there.
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

// A function with a stack of its own, which gives up control and gets it back where it was: what a thread is
// in the simulation, without a thread. Switching costs less than a microsecond. Not thread-safe: all fibers
// of a process belong to one thread.
class Fiber {
 public:
  // `body` runs by and by, in calls of Resume.
  explicit Fiber(std::function<void()> body);
  // A fiber that has not ended keeps its stack and what is on it for good.
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Goes on with the body until it calls Suspend or ends. Not from a fiber.
  void Resume();
  // Goes back to who called Resume. From within the body.
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
  // From a task: lets others go on, perhaps.
  void Yield();
  // From a task: goes on when `condition` is true; it must not change anything. `what` is waited for, for
  // people.
  void WaitUntil(std::string what, Condition condition);

  // Runs until no task can go on, `max_turns` are over or Stop was called. True if all tasks have ended.
  bool Run(int64_t max_turns);
  void Stop() { stopped_ = true; }
  // A line for each task that has not ended, and what it waits for.
  std::string DescribeWaiting() const;

  // ---- Chance ----
  // In [0, below).
  uint64_t Draw(uint64_t below) { return below == 0 ? 0 : random_() % below; }
  // How many turns there have been: the simulation's time.
  int64_t turns() const { return turns_; }
  bool out_of_turns() const { return out_of_turns_; }

  // ---- Runtime ----
  absl::AnyInvocable<void()> Start(Loop* loop) override;
  void Wait(const absl::Notification& done) override;
  absl::Time Now() override { return absl::UnixEpoch() + absl::Milliseconds(turns_); }
  absl::Time WallNow() override { return Now(); }

 private:
  struct Task {
    std::string name;
    std::unique_ptr<Fiber> fiber;
    Condition condition;  // null: it can go on
    std::string waits_for;
    uint64_t weight = 1;  // how often it is its turn: some tasks are slow, some fast
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
