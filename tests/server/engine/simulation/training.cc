// SPDX-License-Identifier: Apache-2.0
// What is to be done in each step, and what disturbs it.
#include <algorithm>
#include <cstring>
#include <random>

#include "server/engine/errors.h"
#include "tests/server/engine/simulation/world.h"

namespace lossd::engine::simulation {
namespace {

bool CompleteAt(const HeadFacts& facts, int64_t opened) {
  using What = Change::What;
  return !facts.Changed({What::kStep, What::kZero, What::kLoad, What::kRecreate}, opened);
}

// One step of one head: its parts, each a task that repeats until it has succeeded.
class Step : public std::enable_shared_from_this<Step> {
 public:
  Step(World& world, HeadWorld& head, uint64_t number) : world_(world), head_(head), number_(number) {
    for (const Duty& duty : head_.duties) {
      for (RowRange rows : duty.parts) parts_.push_back({.duty = &duty, .rows = rows});
    }
  }

  // True if the step was closed, by this or another call.
  void Run();

 private:
  void Spawn(Part& part);
  void Work(Part& part);
  absl::Status Attempt(Part& part, int64_t* opened);
  void NoteFailure(const absl::Status& status);
  // Lets go of what no backward needs any more, or waits until there may be memory.
  void MakeRoom();
  void AwaitPlace();
  // All parts are done, in the generation that is open now.
  bool Complete() const;
  void Redo();
  bool over() const { return over_ || world_.stopping; }
  void Repair();
  void Apply();

  World& world_;
  HeadWorld& head_;
  const uint64_t number_;
  std::vector<Part> parts_;
  int working_ = 0;
  int backwards_ = 0;  // that have ended
  bool over_ = false;
};

void Step::Spawn(Part& part) {
  part.done = false;
  ++working_;
  world_.scheduler.Spawn(absl::StrCat(head_.name, ", step ", number_, ", part of ", part.duty->id),
                         [self = shared_from_this(), &part] {
                           self->Work(part);
                           --self->working_;
                         });
}

void Step::Work(Part& part) {
  while (!over()) {
    int64_t opened = world_.Tick();
    const absl::Status status = Attempt(part, &opened);
    if (status.ok()) {
      part.opened = opened;
      part.done = true;
      return;
    }
    NoteFailure(status);
    if (absl::IsResourceExhausted(status) && part.duty->kind != Kind::kContribution) AwaitPlace();
    world_.scheduler.WaitUntil("repair", [this] { return !head_.needs_repair || over(); });
    world_.scheduler.Yield();
  }
}

// Trainers wait before they ask again; here until a stream has ended, or turns would go by with nothing else.
// In order, the streams that are open may wait for this one's turn.
void Step::AwaitPlace() {
  if (world_.plan.setup.options.deterministic) return;
  const auto open = [this] { return world_.engine->stats().open_streams; };
  world_.scheduler.WaitUntil("a place for a stream", [this, open, before = open()] {
    return over() || head_.needs_repair || open() == 0 || open() < before;
  });
}

void Step::NoteFailure(const absl::Status& status) {
  const std::optional<uint64_t> open = GetCurrentStep(status);
  if (absl::IsNotFound(status) || (open.has_value() && *open != number_)) over_ = true;
  if (absl::IsInternal(status)) head_.needs_repair = true;
}

absl::Status Step::Attempt(Part& part, int64_t* opened) {
  const Duty& duty = *part.duty;
  const Habits habits{.cut = part.attempts < duty.cut_attempts, .bad_row = part.attempts < duty.bad_attempts};
  ++part.attempts;
  if (duty.kind == Kind::kContribution)
    return RunContribution(world_, head_, duty, part.rows, number_, habits.cut, opened);
  if (duty.kind == Kind::kMicrobatch)
    return RunStream(world_, head_, duty, part.rows, StreamKind::kAccumulates, number_, habits, opened);
  absl::Status status =
      RunStream(world_, head_, duty, part.rows, StreamKind::kRetains, number_, habits, nullptr);
  if (absl::IsResourceExhausted(status)) MakeRoom();
  if (!status.ok() && !absl::IsAlreadyExists(status)) return status;
  const bool others_retain = absl::IsAlreadyExists(status);
  part.retained = true;
  status = RunStream(world_, head_, duty, part.rows, StreamKind::kBackward, number_, {}, opened);
  part.retained = false;
  ++backwards_;
  // What another stream retains of these rows is in the way, unless it is all of them.
  if (others_retain && absl::IsNotFound(status)) (void)world_.engine->Release(head_.name, duty.id);
  // Rows that were released or expired are to be sent again; a head that is gone says so to the next call.
  return absl::IsNotFound(status) ? absl::UnavailableError("not retained any more") : status;
}

void Step::MakeRoom() {
  bool released = false;
  for (const Duty& duty : head_.duties) {
    const bool needed = std::any_of(parts_.begin(), parts_.end(), [&duty](const Part& part) {
      return part.duty == &duty && part.retained;
    });
    if (needed) continue;
    const absl::StatusOr<ReleaseResult> released_now = world_.engine->Release(head_.name, duty.id);
    released = released || (released_now.ok() && released_now->released);
  }
  if (released) return;
  // What a stream retains can be released once it has ended.
  const auto open = [this] { return world_.engine->stats().open_streams; };
  world_.scheduler.WaitUntil("retained memory", [this, open, before = open(), backwards = backwards_] {
    const int64_t bytes = world_.plan.setup.options.retained_bytes;
    return over() || backwards_ != backwards || open() < before ||
           world_.engine->stats().retained_bytes_used < bytes;
  });
}

bool Step::Complete() const {
  return std::all_of(parts_.begin(), parts_.end(),
                     [this](const Part& part) { return part.done && CompleteAt(head_.facts, part.opened); });
}

void Step::Redo() {
  for (Part& part : parts_) {
    if (part.done && !CompleteAt(head_.facts, part.opened)) Spawn(part);
  }
}

void Step::Repair() {
  absl::Status status = Zero(world_, head_, number_);
  if (absl::IsNotFound(status) || GetCurrentStep(status).has_value()) over_ = true;
  // Zeroing does not mend weights; a load does.
  if (const auto snapshot = See(world_, head_); snapshot.ok() && !snapshot->tensors_status.ok()) {
    if (Load(world_, head_, number_).ok()) head_.needs_repair = false;
  } else if (status.ok() || over_) {
    head_.needs_repair = false;
  }
}

void Step::Apply() {
  StepRequest request{.step = number_};
  int64_t rows = 0;
  for (const Duty& duty : head_.duties) {
    request.expected_microbatches.push_back(duty.id);
    if (duty.kind != Kind::kContribution) rows += duty.valid_rows();
  }
  request.expected_rows = rows;
  const int64_t begin = world_.Tick();
  const auto result = ApplyStep(world_, head_, request, /*whole=*/true);
  if (result.ok()) {
    over_ = true;
    return;
  }
  const absl::Status& status = result.status();
  if (!GetMissing(status).empty() && CompleteAt(head_.facts, begin + 2))
    world_.Violation(absl::StrCat("rows that were answered OK are missing: ", status.ToString()));
  NoteFailure(status);
  if (!over() && !head_.needs_repair) Redo();
}

void Step::Run() {
  for (Part& part : parts_) Spawn(part);
  while (!over()) {
    world_.scheduler.WaitUntil(absl::StrCat(head_.name, ", step ", number_, ": its parts"), [this] {
      const bool redo = std::any_of(parts_.begin(), parts_.end(), [this](const Part& part) {
        return part.done && !CompleteAt(head_.facts, part.opened);
      });
      return over() || head_.needs_repair || redo || Complete();
    });
    if (over()) break;
    if (head_.needs_repair) {
      Repair();
    } else if (Complete()) {
      Apply();
    } else {
      Redo();
    }
    world_.scheduler.Yield();
  }
  over_ = true;
  head_.abandoned = true;
  world_.scheduler.WaitUntil(absl::StrCat(head_.name, ", step ", number_, ": its tasks"),
                             [this] { return working_ == 0; });
  head_.abandoned = false;
}

uint64_t OpenStepOf(World& world, HeadWorld& head) {
  const auto snapshot = See(world, head);
  return snapshot.ok() ? snapshot->state.step : 0;
}

// A stream of some rows of a duty, with other slices than the duty's own.
void RunTwin(World& world, HeadWorld& head, const Action& action) {
  std::mt19937_64 random(action.seed);
  const Duty& duty = head.duties[action.number % head.duties.size()];
  if (duty.kind == Kind::kContribution) return;
  RowRange rows = duty.parts[random() % duty.parts.size()];
  if (random() % 2 == 0) rows = {0, duty.rows};
  if (rows.size() > 2 && random() % 2 == 0) rows.begin += 1 + static_cast<int64_t>(random() % 2);
  Habits habits;
  const uint64_t habit = random() % 6;
  habits.cut = habit == 0;
  habits.bad_row = habit == 1;
  habits.break_a_rule = habit == 2;
  const bool loss_only = action.kind == Kind::kLossOnly;
  StreamKind kind = duty.kind == Kind::kDeferred ? StreamKind::kRetains : StreamKind::kAccumulates;
  if (loss_only) kind = StreamKind::kLossOnly;
  (void)RunStream(world, head, duty, rows, kind, OpenStepOf(world, head), habits, nullptr);
}

constexpr RowRange kHalves[] = {{0, kVocab / 2}, {kVocab / 2, kVocab}};

// In two messages, which must be of one version of the weights.
void Read(World& world, HeadWorld& head) {
  auto reader = world.engine->OpenReader(head.name);
  if (!reader.ok()) return;
  std::set<float> versions;
  for (const RowRange rows : kHalves) {
    std::vector<uint8_t> values(static_cast<size_t>(rows.size() * kHidden) * 4);
    const auto state = (*reader)->Read({}, rows, kernels::DType::kFloat32, absl::MakeSpan(values));
    world.Note(head.name, " is read, ", Text(rows), ": ", state.status());
    if (!state.ok()) return;
    float version = 0.0f;
    std::memcpy(&version, values.data(), sizeof(version));
    versions.insert(version);
    world.scheduler.Yield();
  }
  if (versions.size() > 1) world.Judge("a tensor was read of several versions", head.name);
}

// In two messages; between them the tensor is of no version.
void Write(World& world, HeadWorld& head) {
  const ChangeScope change(world, head, Change::What::kWrite);
  auto writer = world.engine->OpenWriter(head.name);
  if (!writer.ok()) return;
  (*writer)->SetRows({}, {0, kVocab});
  for (const RowRange rows : kHalves) {
    const std::vector<uint8_t> values(static_cast<size_t>(rows.size() * kHidden) * 4);
    const auto state = (*writer)->Write(rows, kernels::DType::kFloat32, values);
    world.Note(head.name, " is written, ", Text(rows), ": ", state.status());
    if (!state.ok()) return;
    world.scheduler.Yield();
  }
}

void SeeNorm(World& world, HeadWorld& head) {
  const uint64_t step = OpenStepOf(world, head);
  const int64_t begin = world.Tick();
  const auto norm = world.engine->GradNorm(head.name, step);
  if (norm.ok()) head.calls.push_back({.step = step, .begin = begin, .end = world.Tick()});
}

}  // namespace

void Train(World& world, HeadWorld& head) {
  for (int done = 0; done < world.plan.setup.steps && !world.stopping; ++done) {
    const auto snapshot = See(world, head);
    if (snapshot.ok()) {
      std::make_shared<Step>(world, head, snapshot->state.step)->Run();
    } else {
      world.scheduler.WaitUntil(absl::StrCat(head.name, ": to be created"), [&] {
        return world.stopping || !head.facts.Changed({Change::What::kRecreate}, world.Tick());
      });
    }
    world.scheduler.Yield();
  }
  head.trained = true;
}

void Disturb(World& world, HeadWorld& head, const Action& action) {
  world.scheduler.WaitUntil("its time",
                            [&] { return world.ending() || world.scheduler.turns() >= action.at; });
  if (world.ending()) return;
  switch (action.kind) {
    case Kind::kTwin:
    case Kind::kLossOnly:
      return RunTwin(world, head, action);
    case Kind::kZero:
      return (void)Zero(world, head, OpenStepOf(world, head));
    case Kind::kGradNorm:
      return SeeNorm(world, head);
    case Kind::kDescribe:
      (void)world.engine->List();
      (void)world.engine->stats();
      return (void)See(world, head);
    case Kind::kStep: {
      const uint64_t step = OpenStepOf(world, head) + action.number;
      return (void)ApplyStep(world, head, {.step = step == 0 ? 0 : step - 1}, /*whole=*/false);
    }
    case Kind::kWrite:
      return Write(world, head);
    case Kind::kRead:
      return Read(world, head);
    case Kind::kLoad:
      return (void)Load(world, head, action.number);
    case Kind::kReset:
      return Reset(world, head, action.number % 2 == 1 ? ResetScope::kOptimizer : ResetScope::kAll);
    case Kind::kRecreate:
      return Recreate(world, head);
    case Kind::kRelease:
      return (void)world.engine->Release(head.name, action.number);
    case Kind::kExpire:
      return (void)world.engine->ExpireRetained(world.scheduler.Now());
    case Kind::kShutdown:
      world.Note("shutdown");
      world.stopping = true;
      return;
    default:
      return;  // a failure of the device, which is set already
  }
}

}  // namespace lossd::engine::simulation
