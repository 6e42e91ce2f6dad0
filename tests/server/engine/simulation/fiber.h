// SPDX-License-Identifier: Apache-2.0
// A function with a stack of its own, which gives up control and gets it back where it was: what a thread is
// in the simulation, without a thread. Switching costs less than a microsecond.
//
// Not thread-safe: all fibers of a process belong to one thread.
#ifndef LOSSD_TESTS_SERVER_ENGINE_SIMULATION_FIBER_H_
#define LOSSD_TESTS_SERVER_ENGINE_SIMULATION_FIBER_H_

#include <functional>
#include <memory>

namespace lossd::engine::simulation {

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

}  // namespace lossd::engine::simulation

#endif  // LOSSD_TESTS_SERVER_ENGINE_SIMULATION_FIBER_H_
