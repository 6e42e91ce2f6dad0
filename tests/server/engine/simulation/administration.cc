// SPDX-License-Identifier: Apache-2.0
// Administrative calls, with a note of when they were made and what they answered.
#include "server/engine/errors.h"
#include "tests/server/engine/simulation/world.h"

namespace lossd::engine::simulation {
namespace {

void NoteCall(World& world, HeadWorld& head, Call::What what, uint64_t step, int64_t begin) {
  head.calls.push_back({.what = what, .step = step, .begin = begin, .end = world.Tick()});
}

// What a call that failed says about the open step.
void NoteFailure(World& world, HeadWorld& head, const absl::Status& status, uint64_t step, int64_t begin) {
  if (absl::IsNotFound(status)) NoteCall(world, head, Call::What::kNotFound, 0, begin);
  if (GetCurrentStep(status).has_value() && GetMissing(status).empty())
    NoteCall(world, head, Call::What::kRefused, step, begin);
}

// Keeps other loads, deletions and creations of the head away to the end of the scope.
class HeadLock {
 public:
  HeadLock(World& world, HeadWorld& head) : head_(head) {
    world.scheduler.WaitUntil(absl::StrCat(head.name, ": its lock"), [&head] { return !head.locked; });
    head.locked = true;
  }
  ~HeadLock() { head_.locked = false; }
  HeadLock(const HeadLock&) = delete;
  HeadLock& operator=(const HeadLock&) = delete;

 private:
  HeadWorld& head_;
};

// The generations of the head that were closed since `first` was open.
std::string CheckClosed(World& world, const HeadWorld& head, const StepResult& result, int64_t first,
                        bool whole) {
  const DeviceHead* const on_device = world.On(head);
  if (on_device == nullptr) return "";  // the head was deleted meanwhile
  std::string wrong = "no generation has its rows";
  for (int64_t number = first; number < on_device->generation_number(); ++number) {
    const Generation& generation = world.device.Of(number);
    if (generation.rows != result.rows) continue;
    wrong = whole ? CheckWholeStep(generation, head.duties) : "";
    if (wrong.empty()) return "";
  }
  return wrong;
}

}  // namespace

absl::StatusOr<StepResult> ApplyStep(World& world, HeadWorld& head, const StepRequest& request, bool whole) {
  const ChangeScope change(world, head, Change::What::kStep);
  const DeviceHead* const on_device = world.On(head);
  const int64_t first = on_device == nullptr ? 0 : on_device->generation_number();
  auto result = world.engine->ApplyStep(head.name, request);
  world.Note(head.name, " applies step ", request.step, ": ", result.status());
  if (!result.ok()) {
    NoteFailure(world, head, result.status(), request.step, change.begin());
    return result;
  }
  const auto what = result->repeated ? Call::What::kRepeated : Call::What::kApplied;
  NoteCall(world, head, what, request.step, change.begin());
  if (!result->repeated)
    world.Judge(CheckClosed(world, head, *result, first, whole), head.name, ", step ", request.step);
  return result;
}

absl::Status Zero(World& world, HeadWorld& head, uint64_t step) {
  const ChangeScope change(world, head, Change::What::kZero);
  const absl::Status status = world.engine->ZeroGradients(head.name, step).status();
  world.Note(head.name, " zeroes step ", step, ": ", status);
  if (status.ok()) {
    NoteCall(world, head, Call::What::kZeroed, step, change.begin());
  } else {
    NoteFailure(world, head, status, step, change.begin());
  }
  return status;
}

namespace {

// The values of step `step` take the place of the head's, which has begun with `status` since `begin`.
absl::Status Replace(World& world, HeadWorld& head, uint64_t step, absl::Status status, int64_t begin) {
  if (!absl::IsNotFound(status)) {
    NoteCall(world, head, status.ok() ? Call::What::kLoaded : Call::What::kMaybe, step, begin);
  }
  if (status.ok()) {
    status = world.engine->OnDevice(head.name, [](head::Head& on_device) {
      return on_device.kernels().WriteTensor({}, 0, 0, kernels::DType::kFloat32, {});
    });
  }
  if (status.ok()) status = world.engine->EndLoad(head.name);
  world.Note(head.name, " loads step ", step, ": ", status);
  if (!status.ok()) head.needs_repair = true;
  return status;
}

}  // namespace

// It takes effect when it begins.
absl::Status Load(World& world, HeadWorld& head, uint64_t step) {
  const HeadLock lock(world, head);
  const ChangeScope change(world, head, Change::What::kLoad);
  const absl::Status status =
      world.engine->BeginLoad(head.name, {.step = step, .updates = step}, std::nullopt);
  world.Note(head.name, " begins to load step ", step, ": ", status);
  return Replace(world, head, step, status, change.begin());
}

// One of the optimizer is as a zeroing of the open step, one of all as a load of step 0.
void Reset(World& world, HeadWorld& head, ResetScope scope) {
  const HeadLock lock(world, head);
  const bool all = scope == ResetScope::kAll;
  const ChangeScope change(world, head, all ? Change::What::kLoad : Change::What::kZero);
  const absl::StatusOr<HeadState> state = world.engine->Reset(head.name, scope);
  world.Note(head.name, " resets ", all ? "all: " : "its optimizer: ", state.status());
  if (absl::IsFailedPrecondition(state.status())) return;  // calls are open on it
  if (all) return (void)Replace(world, head, 0, state.status(), change.begin());
  if (state.ok()) return NoteCall(world, head, Call::What::kZeroed, state->step, change.begin());
  NoteFailure(world, head, state.status(), 0, change.begin());
}

absl::Status Create(World& world, HeadWorld& head) {
  const HeadLock lock(world, head);
  const ChangeScope change(world, head, Change::What::kRecreate);
  absl::Status status = world.engine->CreateHead(head.name, head.config);
  if (status.ok()) status = world.engine->PublishHead(head.name);
  world.Note("creates ", head.name, ": ", status);
  if (status.ok()) NoteCall(world, head, Call::What::kCreated, 0, change.begin());
  if (absl::IsNotFound(status)) NoteCall(world, head, Call::What::kMaybeCreated, 0, change.begin());
  return status;
}

void Recreate(World& world, HeadWorld& head) {
  const ChangeScope change(world, head, Change::What::kRecreate);
  absl::Status status;
  {
    const HeadLock lock(world, head);
    status = world.engine->DeleteHead(head.name);
  }
  world.Note("deletes ", head.name, ": ", status);
  if (!status.ok()) return;
  NoteCall(world, head, Call::What::kDeleted, 0, change.begin());
  world.scheduler.Yield();
  (void)Create(world, head);
}

absl::StatusOr<HeadSnapshot> See(World& world, HeadWorld& head) {
  const int64_t begin = world.Tick();
  auto snapshot = world.engine->Describe(head.name);
  if (snapshot.ok()) {
    NoteCall(world, head, Call::What::kSees, snapshot->state.step, begin);
  } else if (absl::IsNotFound(snapshot.status())) {
    NoteCall(world, head, Call::What::kNotFound, 0, begin);
  }
  return snapshot;
}

}  // namespace lossd::engine::simulation
