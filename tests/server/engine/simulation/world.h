// SPDX-License-Identifier: Apache-2.0
// World: what the tasks of one simulation share: the engine, the device, what is known about each head, the
// violations that were found, and the trace.
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

// The text of a status for notes, without its payloads. Other values stay as they are.
inline std::string Plain(const absl::Status& status) {
  return absl::StrCat(absl::StatusCodeToString(status.code()), status.ok() ? "" : ": ", status.message());
}
template <typename T>
const T& Plain(const T& part) {
  return part;
}

// The knowledge that the trainers and operators of one head have of it.
struct HeadWorld {
  int index = 0;
  std::string name;
  kernels::HeadConfig config;
  std::vector<Duty> duties;
  HeadFacts facts;
  std::vector<Call> calls;
  bool needs_repair = false;  // a trainer was told that the gradients or the weights cannot be trusted
  bool locked = false;        // by a load, a deletion or a creation; they take turns as in server/admin
  // Another task closed the step or deleted the head, so the rest of the step is not sent.
  bool abandoned = false;
  bool trained = false;  // all its steps are done
};

// Sums up the engine's reports.
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
  bool closing = false;   // all steps are done: calls that still wait reach their deadlines
  bool stopping = false;  // the server shuts down
  std::deque<absl::AnyInvocable<void()>> memory_ready;  // the functions that OnMemory got
  int64_t receiving = 0;                                // how many of them are running now
  std::map<int64_t, int64_t> generation_of_stream;      // by stream number
  VersionNames version_names;                           // of all heads together
  int64_t streams = 0;     // the number of streams so far, which is also the last stream's number
  int64_t live_calls = 0;  // the number of on_queued functions that the engine has
  int64_t results = 0;     // the number of slices and ends that were checked

  // The time of the simulation in finer steps than the scheduler's turns: each event has another one.
  int64_t Tick() { return ++ticks_; }
  bool ending() const { return closing || stopping; }
  DeviceHead* On(const HeadWorld& head) const { return device.Find(head.config.vocab_size); }

  template <typename... Parts>
  void Note(const Parts&... parts) {
    if (tracing_) trace_.push_back(absl::StrCat("  ", scheduler.turns(), " ", Plain(parts)...));
  }
  // Reports a violation if `wrong` is not empty. CheckSlice and the other rules return `wrong`.
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

// Records a change of a head that lasts until the end of the scope.
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

// The progress of one part of a duty.
struct Part {
  const Duty* duty = nullptr;
  RowRange rows;
  bool done = false;
  bool retained = false;  // its rows are retained, and its backward is still to come
  int64_t opened = 0;     // when the call that completed it was opened
  int attempts = 0;
};

// ---- Tasks ----

// The ways in which a stream misbehaves.
struct Habits {
  bool cut = false, bad_row = false, break_a_rule = false;
};
enum class StreamKind : uint8_t { kAccumulates, kLossOnly, kRetains, kBackward, kEmbeds };
// Opens a stream, sends its rows and waits for its end. If it was opened, stores the time in `opened`.
absl::Status RunStream(World& world, HeadWorld& head, const Duty& duty, RowRange rows, StreamKind kind,
                       uint64_t step, Habits habits, int64_t* opened);
// Opens a stream that must be refused. Checks that it is refused and that nothing has changed.
void RunRefused(World& world, HeadWorld& head, const Action& action);
// Sends the rows of a contribution.
absl::Status RunContribution(World& world, HeadWorld& head, const Duty& duty, RowRange rows, uint64_t step,
                             bool cut, int64_t* opened);

// Makes sure that all duties of each step are done, and applies the steps.
void Train(World& world, HeadWorld& head);
// Carries out an action that is not a duty.
void Disturb(World& world, HeadWorld& head, const Action& action);

// ---- Administrative calls; each records its answer ----
absl::StatusOr<StepResult> ApplyStep(World& world, HeadWorld& head, const StepRequest& request, bool whole);
absl::Status Zero(World& world, HeadWorld& head, uint64_t step);
absl::Status Load(World& world, HeadWorld& head, uint64_t step);
absl::Status Create(World& world, HeadWorld& head);
void Reset(World& world, HeadWorld& head, ResetScope scope);
void Recreate(World& world, HeadWorld& head);
absl::StatusOr<HeadSnapshot> See(World& world, HeadWorld& head);

}  // namespace lossd::engine::simulation

#endif  // LOSSD_TESTS_SERVER_ENGINE_SIMULATION_WORLD_H_
