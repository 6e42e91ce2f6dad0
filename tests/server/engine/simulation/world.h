// SPDX-License-Identifier: Apache-2.0
// What the tasks of one simulation share: the engine, the device, what is known of each head, the violations
// that were found, and the trace.
#ifndef LOSSD_TESTS_SERVER_ENGINE_SIMULATION_WORLD_H_
#define LOSSD_TESTS_SERVER_ENGINE_SIMULATION_WORLD_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/strings/str_cat.h"
#include "server/engine/engine.h"
#include "tests/server/engine/fake_backend.h"
#include "tests/server/engine/simulation/device.h"
#include "tests/server/engine/simulation/plan.h"
#include "tests/server/engine/simulation/rules.h"
#include "tests/server/engine/simulation/scheduler.h"

namespace lossd::engine::simulation {

// For notes: a status without its payloads, and everything else as it is.
inline std::string Plain(const absl::Status& status) {
  return absl::StrCat(absl::StatusCodeToString(status.code()), status.ok() ? "" : ": ", status.message());
}
template <typename T>
const T& Plain(const T& part) {
  return part;
}

// One head, seen by its trainers and operators.
struct HeadWorld {
  int index = 0;
  std::string name;
  kernels::HeadConfig config;
  std::vector<Duty> duties;
  HeadFacts facts;
  std::vector<Call> calls;
  bool needs_repair = false;  // a trainer was told that the gradients or the weights are not to be trusted
  bool locked = false;        // by a load, a deletion or a creation, which take turns as in server/admin
  bool abandoned = false;     // somebody else closed the step, or deleted the head: nobody sends the rest
  bool trained = false;       // its steps are over
};

// Adds up what the engine reports.
class Totals final : public SilentObserver {
 public:
  explicit Totals(Scheduler* scheduler) : scheduler_(scheduler) {}
  void OnChunk(const ChunkReport& report) override;
  void OnContribution(const ContributionReport& report) override;
  void OnDeviceError(const absl::Status&) override { scheduler_->Yield(); }

  int64_t chunks = 0, rows = 0, valid_rows = 0, added_rows = 0;
  std::map<kernels::Embedding, int64_t> rows_of_kind;
  bool negative = false;

 private:
  Scheduler* const scheduler_;
};

class World {
 public:
  World(const Plan& plan, uint64_t schedule_seed, bool tracing);

  const Plan& plan;
  Scheduler scheduler;
  Device device;
  Totals totals{&scheduler};
  std::unique_ptr<Engine> engine;
  std::vector<HeadWorld> heads;
  bool closing = false;   // all steps are over: calls that still wait reach their deadlines
  bool stopping = false;  // the server shuts down
  std::deque<absl::AnyInvocable<void()>> memory_ready;  // what OnMemory was given
  int64_t receiving = 0;                                // of them, those that run now
  std::map<int64_t, int64_t> generation_of_stream;      // by number
  VersionNames version_names;                           // of all heads
  int64_t streams = 0;                                  // so far, and their last number
  int64_t live_calls = 0;                               // on_queued functions that the engine has
  int64_t results = 0;                                  // slices and ends that were checked

  // The simulation's time, finer than the scheduler's: another one for each event.
  int64_t Tick() { return ++ticks_; }
  bool ending() const { return closing || stopping; }
  DeviceHead* On(const HeadWorld& head) const { return device.Find(head.config.vocab_size); }

  template <typename... Parts>
  void Note(const Parts&... parts) {
    if (tracing_) trace_.push_back(absl::StrCat("  ", scheduler.turns(), " ", Plain(parts)...));
  }
  // `wrong` as CheckSlice and its like return it.
  template <typename... Parts>
  void Judge(const std::string& wrong, const Parts&... who) {
    if (!wrong.empty()) Violation(absl::StrCat(who..., ": ", wrong));
  }
  void Violation(std::string text);
  const std::vector<std::string>& violations() const { return violations_; }
  const std::vector<std::string>& trace() const { return trace_; }

 private:
  const bool tracing_;
  int64_t ticks_ = 0;
  std::vector<std::string> violations_, trace_;
};

// A change of a head, from here to the end of the scope.
class ChangeScope {
 public:
  ChangeScope(World& world, HeadWorld& head, Change::What what);
  ~ChangeScope();
  ChangeScope(const ChangeScope&) = delete;
  ChangeScope& operator=(const ChangeScope&) = delete;
  int64_t begin() const { return begin_; }

 private:
  World& world_;
  HeadWorld& head_;
  const size_t index_;
  const int64_t begin_;
};

// What a part of a duty has come to.
struct Part {
  const Duty* duty = nullptr;
  RowRange rows;
  bool done = false;
  bool retained = false;  // its rows are, and its backward is still to come
  int64_t opened = 0;     // the call that did it
  int attempts = 0;
};

// ---- Tasks ----

// What a stream does besides what it should.
struct Habits {
  bool cut = false, bad_row = false, break_a_rule = false;
};
enum class StreamKind : uint8_t { kAccumulates, kLossOnly, kRetains, kBackward, kEmbeds };
// Opens a stream, sends its rows and waits for its end. `opened`: when, if it was.
absl::Status RunStream(World& world, HeadWorld& head, const Duty& duty, RowRange rows, StreamKind kind,
                       uint64_t step, Habits habits, int64_t* opened);
// Opens a stream that is to be refused, and judges that it is, and has changed nothing.
void RunRefused(World& world, HeadWorld& head, const Action& action);
// Adds rows of a contribution.
absl::Status RunContribution(World& world, HeadWorld& head, const Duty& duty, RowRange rows, uint64_t step,
                             bool cut, int64_t* opened);

// Sees to it that all duties are done in each step, and applies the steps.
void Train(World& world, HeadWorld& head);
// Does what an action says that is no duty.
void Disturb(World& world, HeadWorld& head, const Action& action);

// ---- Administration: calls, and notes of what they answered ----
absl::StatusOr<StepResult> ApplyStep(World& world, HeadWorld& head, const StepRequest& request, bool whole);
absl::Status Zero(World& world, HeadWorld& head, uint64_t step);
absl::Status Load(World& world, HeadWorld& head, uint64_t step);
absl::Status Create(World& world, HeadWorld& head);
void Reset(World& world, HeadWorld& head, ResetScope scope);
void Recreate(World& world, HeadWorld& head);
absl::StatusOr<HeadSnapshot> See(World& world, HeadWorld& head);

}  // namespace lossd::engine::simulation

#endif  // LOSSD_TESTS_SERVER_ENGINE_SIMULATION_WORLD_H_
