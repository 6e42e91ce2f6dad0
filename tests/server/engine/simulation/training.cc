// SPDX-License-Identifier: Apache-2.0
// The tasks of a simulation: what is to be done in each step and what disturbs it, the streams of a trainer,
// and the administrative calls.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <utility>

#include "server/engine/errors.h"
#include "tests/server/engine/simulation/world.h"

namespace lossd::engine::simulation {
namespace {

bool CompleteAt(const HeadFacts& facts, int64_t opened) {
  using What = Change::What;
  return !facts.Changed({What::kStep, What::kZero, What::kLoad, What::kReset, What::kRecreate}, opened);
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
  if (duty.embeds_before) {
    absl::Status embedded =
        RunStream(world_, head_, duty, part.rows, StreamKind::kEmbeds, number_, {}, nullptr);
    if (!embedded.ok()) return embedded;
  }
  if (duty.kind == Kind::kMicrobatch || duty.adds_row_gradients())
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
  request.optimizer.lazy_rows = world_.plan.setup.lazy_rows && number_ % 2 == 1;
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
  const bool embeds = action.kind == Kind::kEmbed;
  if (duty.kind == Kind::kContribution && !embeds) return;
  RowRange rows = duty.parts[random() % duty.parts.size()];
  if (random() % 2 == 0) rows = {0, duty.rows};
  if (rows.size() > 2 && random() % 2 == 0) rows.begin += 1 + static_cast<int64_t>(random() % 2);
  Habits habits;
  const uint64_t habit = random() % 6;
  habits.cut = habit == 0;
  habits.bad_row = habit == 1;
  habits.break_a_rule = habit == 2;
  StreamKind kind = duty.kind == Kind::kDeferred ? StreamKind::kRetains : StreamKind::kAccumulates;
  if (action.kind == Kind::kLossOnly && !duty.adds_row_gradients()) kind = StreamKind::kLossOnly;
  if (embeds) kind = StreamKind::kEmbeds;
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
    world.Judge(CheckVersion(state->weights_version, static_cast<int64_t>(version), world.version_names),
                head.name, " is read");
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
    case Kind::kEmbed:
      return RunTwin(world, head, action);
    case Kind::kRefused:
      return RunRefused(world, head, action);
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
      StepRequest request{.step = step == 0 ? 0 : step - 1};
      request.optimizer.lazy_rows = action.seed % 2 == 0;
      return (void)ApplyStep(world, head, request, /*whole=*/false);
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

// ---- A stream of a trainer ----
// It is opened, fed and read, with all that a client may do wrong or leave undone.

namespace {

// What comes from the engine lies in an inbox until the reader, a task of its own, takes it.
class Inbox final : public StreamObserver {
 public:
  explicit Inbox(World* world) : world_(world) {}
  void OnMemory(absl::AnyInvocable<void()> receive) override {
    world_->memory_ready.push_back(std::move(receive));
    world_->scheduler.Yield();
  }
  void OnSlice(SliceOutput output) override {
    if (ended_) world_->Violation("a slice after the end of its stream");
    slices_.push_back(std::move(output));
    world_->scheduler.Yield();
  }
  void OnFinished(absl::Status status, const StreamSummary& summary) override {
    if (ended_) world_->Violation("a stream ended twice");
    ended_ = true;
    status_ = std::move(status);
    summary_ = summary;
    world_->scheduler.Yield();
  }

  bool HasNews() const { return !slices_.empty() || ended_; }
  std::optional<SliceOutput> TakeSlice() {
    if (slices_.empty()) return std::nullopt;
    SliceOutput output = std::move(slices_.front());
    slices_.pop_front();
    return output;
  }
  const absl::Status& status() const { return status_; }
  const StreamSummary& summary() const { return summary_; }

 private:
  World* const world_;
  std::deque<SliceOutput> slices_;
  bool ended_ = false;
  absl::Status status_;
  StreamSummary summary_;
};

// A slice that was handed over. Counts the functions that the engine still has.
struct SentSlice {
  bool queued = false, gone = false;
};
class Token {
 public:
  Token(World* world, std::shared_ptr<SentSlice> slice) : world_(world), slice_(std::move(slice)) {
    ++world_->live_calls;
  }
  Token(Token&& other) noexcept
      : world_(std::exchange(other.world_, nullptr)), slice_(std::move(other.slice_)) {}
  ~Token() {
    if (world_ == nullptr) return;
    --world_->live_calls;
    slice_->gone = true;
  }
  SentSlice& slice() const { return *slice_; }

 private:
  World* world_;
  std::shared_ptr<SentSlice> slice_;
};

class StreamTask : public std::enable_shared_from_this<StreamTask> {
 public:
  StreamTask(World& world, HeadWorld& head, const Duty& duty, RowRange rows, StreamKind kind, Habits habits)
      : world_(world), head_(head), kind_(kind), habits_(habits), inbox_(std::make_shared<Inbox>(&world)) {
    facts_.duty = &duty;
    facts_.rows = rows;
    facts_.accumulates = kind == StreamKind::kAccumulates || kind == StreamKind::kBackward;
    facts_.retains = kind == StreamKind::kRetains;
    facts_.backward = kind == StreamKind::kBackward;
    if (kind == StreamKind::kEmbeds) {
      facts_.embedding = kernels::Embedding::kRows;
    } else if (duty.adds_row_gradients()) {
      facts_.embedding = kernels::Embedding::kGradients;
    }
  }

  absl::Status Run(uint64_t step, int64_t* opened);

 private:
  Scheduler& scheduler() { return world_.scheduler; }
  std::string Who() const;
  absl::Status Open(uint64_t step);
  std::string Peer() const;
  StreamSpec Spec(uint64_t step) const;
  BackwardSpec Backward(uint64_t step) const;
  void NoteOpened(uint64_t step, const absl::Status& status);

  void Send();
  // Rows of one slice after another.
  std::vector<RowRange> Cut();
  void SendSlice(RowRange rows);
  std::vector<float> Hidden(RowRange rows);
  void GiveUp(absl::Status why);
  // True if nobody has use for the rest of the stream.
  bool NobodyWaits() const { return world_.stopping || head_.abandoned || (world_.closing && head_.trained); }
  void Read();
  // What a call that has ended well says of its rows.
  void NotePromises();
  void WaitForEnd();

  World& world_;
  HeadWorld& head_;
  const StreamKind kind_;
  const Habits habits_;
  StreamFacts facts_;
  std::shared_ptr<Inbox> inbox_;
  std::unique_ptr<Stream> stream_;
  std::shared_ptr<SentSlice> last_;
  bool finished_ = false;
};

std::string StreamTask::Who() const {
  static constexpr const char* kKinds[] = {"accumulating", "loss-only", "retaining", "backward", "embedding"};
  return absl::StrCat("stream ", facts_.number, " (", kKinds[static_cast<size_t>(kind_)], ", ", head_.name,
                      ", microbatch ", facts_.duty->id, ", rows ", Text(facts_.rows), ")");
}

// Three share the server.
std::string StreamTask::Peer() const { return absl::StrCat("peer ", facts_.number % 3); }

// ---- Opening ----

StreamSpec SpecOf(const HeadWorld& head, const StreamFacts& stream, uint64_t step) {
  const Duty& duty = *stream.duty;
  StreamSpec spec;
  spec.head = head.name;
  spec.step = step;
  spec.microbatch_id = duty.id;
  spec.microbatch_rows = duty.rows;
  spec.rows = stream.rows;
  spec.hidden_dtype = kernels::DType::kFloat32;
  spec.options.embedding = stream.embedding;
  spec.accumulate_gradients = stream.accumulates;
  const auto begin = stream.rows.begin, end = stream.rows.end;
  spec.targets.assign(duty.targets.begin() + begin, duty.targets.begin() + end);
  if (stream.embedding != kernels::Embedding::kNone) {
    spec.want_grad_hidden = stream.embedding == kernels::Embedding::kRows;
    if (stream.embedding == kernels::Embedding::kGradients) spec.grad_output = duty.scale;
    return spec;
  }
  spec.want_grad_hidden = duty.want_grad_hidden && !stream.retains;
  spec.reduction = stream.retains ? Reduction::kNone : Reduction::kSum;
  spec.retain = stream.retains;
  spec.want_rows.loss = spec.want_rows.lse = true;
  if (!stream.retains) spec.depths = duty.depths;
  if (!duty.row_weights.empty())
    spec.row_weights.assign(duty.row_weights.begin() + begin, duty.row_weights.begin() + end);
  return spec;
}

StreamSpec StreamTask::Spec(uint64_t step) const {
  StreamSpec spec = SpecOf(head_, facts_, step);
  spec.peer = Peer();
  return spec;
}

BackwardSpec StreamTask::Backward(uint64_t step) const {
  BackwardSpec spec;
  spec.head = head_.name;
  spec.peer = Peer();
  spec.step = step;
  spec.microbatch_id = facts_.duty->id;
  spec.rows = facts_.rows;
  spec.want_grad_hidden = facts_.duty->want_grad_hidden;
  spec.accumulate_gradients = true;
  for (int64_t row = facts_.rows.begin; row < facts_.rows.end; ++row)
    spec.grad_loss.push_back(UpstreamOf(row));
  return spec;
}

absl::Status StreamTask::Open(uint64_t step) {
  facts_.number = ++world_.streams;
  facts_.opened = world_.Tick();
  facts_.failed_results = world_.device.failed_results;
  facts_.broken = world_.device.broken;
  auto stream = facts_.backward ? world_.engine->OpenBackward(Backward(step), inbox_)
                                : world_.engine->Open(Spec(step), inbox_);
  NoteOpened(step, stream.status());
  if (!stream.ok()) {
    world_.Judge(
        CheckRefusal(stream.status(), facts_, head_.facts, world_.device, world_.plan.setup, world_.stopping),
        Who());
    return stream.status();
  }
  stream_ = *std::move(stream);
  const DeviceHead* const on_device = world_.On(head_);
  facts_.generation = on_device->generation_number();
  facts_.version = on_device->version();
  facts_.weights_version = stream_->state().weights_version;
  facts_.row_grid = stream_->limits().row_grid;
  world_.generation_of_stream[facts_.number] = facts_.generation;
  return absl::OkStatus();
}

void StreamTask::NoteOpened(uint64_t step, const absl::Status& status) {
  world_.Note(Who(), " opens for step ", step, ": ", status);
  const int64_t now = world_.Tick();
  Call call{.step = step, .begin = now, .end = now};
  if (absl::IsNotFound(status) && !facts_.backward) {
    call.what = Call::What::kNotFound;
  } else if (!status.ok() && GetCurrentStep(status).has_value()) {
    call.what = Call::What::kRefused;
  } else if (!status.ok()) {
    return;
  }
  head_.calls.push_back(call);
}

// ---- Sending ----

std::vector<RowRange> StreamTask::Cut() {
  if (facts_.backward) return stream_->RetainedSlices();
  const SliceLimits limits = stream_->limits();
  std::vector<RowRange> slices;
  for (int64_t row = facts_.rows.begin; row < facts_.rows.end; row = slices.back().end) {
    const int64_t most = std::min({limits.max_rows, facts_.rows.end - row, limits.NextGridRow(row) - row,
                                   EndOfDepth(*facts_.duty, row) - row});
    slices.push_back({row, row + 1 + static_cast<int64_t>(scheduler().Draw(static_cast<uint64_t>(most)))});
  }
  if (!limits.has_grid() && scheduler().Draw(2) == 0) std::reverse(slices.begin(), slices.end());
  return slices;
}

std::vector<float> StreamTask::Hidden(RowRange rows) {
  std::vector<float> hidden;
  const int64_t bad =
      habits_.bad_row
          ? rows.begin + static_cast<int64_t>(scheduler().Draw(static_cast<uint64_t>(rows.size())))
          : -1;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const bool is_bad = row == bad;
    if (is_bad) head_.facts.bad_rows[facts_.duty->id].insert(row);
    hidden.push_back(is_bad ? std::numeric_limits<float>::quiet_NaN() : NameOf(facts_.duty->id, row));
    hidden.push_back(static_cast<float>(facts_.number));
  }
  return hidden;
}

void StreamTask::SendSlice(RowRange rows) {
  facts_.slices.push_back(rows);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    facts_.sent.insert(row);
    if (facts_.accumulates)
      head_.facts.senders[static_cast<int64_t>(NameOf(facts_.duty->id, row))].insert(facts_.number);
  }
  last_ = std::make_shared<SentSlice>();
  IncomingSlice slice{.rows = rows};
  slice.on_queued = [this, self = shared_from_this(), rows, token = Token(&world_, last_)](int64_t) {
    world_.Note(Who(), ": ", Text(rows), " is queued");
    token.slice().queued = true;
  };
  if (facts_.embedding == kernels::Embedding::kRows) {
    slice.copy = [this, self = shared_from_this()](uint8_t*) { scheduler().Yield(); };
  } else if (!facts_.backward) {
    std::vector<float> hidden = Hidden(rows);
    slice.bytes = static_cast<int64_t>(hidden.size() * sizeof(float));
    slice.copy = [this, self = shared_from_this(), hidden = std::move(hidden)](uint8_t* to) {
      scheduler().Yield();
      std::memcpy(to, hidden.data(), hidden.size() * sizeof(float));
      scheduler().Yield();
    };
  }
  if (habits_.break_a_rule && scheduler().Draw(2) == 0) {
    facts_.broke_a_rule = true;
    slice.bytes += 4;
  }
  world_.Note(Who(), " sends ", Text(rows));
  stream_->Receive(std::move(slice));
}

void StreamTask::GiveUp(absl::Status why) {
  facts_.cut = true;
  world_.Note(Who(), " is given up");
  if (scheduler().Draw(2) == 0) {
    stream_->Cancel(std::move(why));
  } else {
    stream_.reset();
  }
}

void StreamTask::Send() {
  const std::vector<RowRange> slices = Cut();
  const size_t cut_at = habits_.cut ? scheduler().Draw(slices.size() + 1) : slices.size() + 1;
  for (size_t i = 0; i < slices.size() && !finished_; ++i) {
    scheduler().Yield();
    SendSlice(slices[i]);
    if (i == cut_at) {
      scheduler().Yield();
      return GiveUp(absl::CancelledError("cut"));
    }
    scheduler().WaitUntil(absl::StrCat(Who(), ": slice ", Text(slices[i]), " to be queued"),
                          [this] { return last_->queued || last_->gone || finished_ || NobodyWaits(); });
    if (!last_->queued && !last_->gone && !finished_)
      return GiveUp(absl::DeadlineExceededError("the call's deadline"));
    if (habits_.break_a_rule && scheduler().Draw(4) == 0) break;
  }
  scheduler().Yield();
  if (habits_.cut && cut_at >= slices.size()) return GiveUp(absl::CancelledError("cut at the end"));
  if (habits_.break_a_rule) facts_.broke_a_rule = true;
  stream_->HalfClose();
}

// ---- The end ----

void StreamTask::Read() {
  while (true) {
    scheduler().WaitUntil(absl::StrCat(Who(), ": results"), [this] { return inbox_->HasNews(); });
    scheduler().Yield();
    std::optional<SliceOutput> slice = inbox_->TakeSlice();
    if (!slice.has_value()) break;
    ++world_.results;
    const DeviceHead* const on_device = world_.On(head_);
    const int64_t newest = on_device == nullptr ? std::numeric_limits<int64_t>::max() : on_device->version();
    world_.Note(Who(), " gets ", Text(slice->rows));
    world_.Judge(CheckSlice(*slice, world_.device, newest, facts_), Who());
    scheduler().Yield();
  }
  ++world_.results;
  const StreamSummary& summary = inbox_->summary();
  world_.Note(Who(), " ends: ", inbox_->status(), "; accumulated ", summary.accumulated_rows, ", repeated ",
              summary.repeated_rows);
  world_.Judge(CheckEnd(inbox_->status(), summary, facts_, head_.facts, world_.device, world_.stopping),
               Who());
  for (const int64_t version : facts_.versions) {
    if (inbox_->status().ok())
      world_.Judge(CheckVersion(summary.state.weights_version, version, world_.version_names), Who());
  }
  if (inbox_->status().ok() && facts_.accumulates) NotePromises();
  finished_ = true;
}

void StreamTask::NotePromises() {
  const std::vector<int32_t>& targets = facts_.duty->targets;
  for (int64_t row = facts_.rows.begin; row < facts_.rows.end; ++row) {
    if (targets[static_cast<size_t>(row)] >= 0)
      world_.device.Promise(facts_.generation, static_cast<int64_t>(NameOf(facts_.duty->id, row)));
  }
}

void StreamTask::WaitForEnd() {
  scheduler().WaitUntil(absl::StrCat(Who(), ": its end"),
                        [this] { return finished_ || (!facts_.cut && NobodyWaits()); });
  if (finished_) return;
  GiveUp(absl::DeadlineExceededError("the call's deadline"));
  scheduler().WaitUntil(absl::StrCat(Who(), ": its end, after it was given up"),
                        [this] { return finished_; });
}

absl::Status StreamTask::Run(uint64_t step, int64_t* opened) {
  if (absl::Status status = Open(step); !status.ok()) return status;
  if (opened != nullptr) *opened = facts_.opened;
  scheduler().Spawn(absl::StrCat("reader of stream ", facts_.number),
                    [self = shared_from_this()] { self->Read(); });
  scheduler().Yield();
  stream_->Start();
  Send();
  WaitForEnd();
  scheduler().Yield();
  stream_.reset();
  return inbox_->status();
}

}  // namespace

absl::Status RunStream(World& world, HeadWorld& head, const Duty& duty, RowRange rows, StreamKind kind,
                       uint64_t step, Habits habits, int64_t* opened) {
  return std::make_shared<StreamTask>(world, head, duty, rows, kind, habits)->Run(step, opened);
}

// ---- Streams that are refused ----

namespace {

// Breaks one rule about the fields of a stream of an embedding.
void BreakEmbedding(std::mt19937_64& random, const kernels::HeadConfig& config, StreamSpec& spec) {
  const uint64_t rule = spec.rows.size() > 0 ? random() % 10 : random() % 7;
  switch (rule) {
    case 0:
      spec.want_grad_hidden = !spec.want_grad_hidden;
      return;
    case 1:
      spec.accumulate_gradients = !spec.accumulate_gradients;
      return;
    case 2:
      spec.reduction = random() % 2 == 0 ? Reduction::kMean : Reduction::kNone;
      spec.normalizer = 1.0;
      return;
    case 3:
      spec.retain = true;
      return;
    case 4:
      spec.want_rows.loss = true;
      return;
    case 5:
      spec.depths = {{.rows = spec.microbatch_rows}};
      return;
    case 6:
      spec.grad_output = std::numeric_limits<float>::infinity();
      return;
    case 7:
      spec.row_weights.assign(spec.targets.size(), 1.0f);
      return;
    default:  // an id that names no row of the weight
      spec.targets[random() % spec.targets.size()] = rule == 8 ? static_cast<int32_t>(config.vocab_size) : -1;
      return;
  }
}

// Makes a stream contradict what has been accumulated of row `row` of its microbatch: the row has another
// target, another factor, or is of another kind. The id of a contribution is enough of a contradiction.
void Contradict(std::mt19937_64& random, int64_t row, const StreamFacts& stream, StreamSpec& spec) {
  if (stream.duty->kind == Kind::kContribution) return;
  const uint64_t how = random() % 3;
  if (how == 0) {
    int32_t& target = spec.targets[static_cast<size_t>(row - spec.rows.begin)];
    target = (target + 1) % kVocab;
  } else if (how == 1) {
    spec.grad_output *= 2.0f;
  } else {
    spec.options.embedding = stream.embedding == kernels::Embedding::kNone ? kernels::Embedding::kGradients
                                                                           : kernels::Embedding::kNone;
    spec.want_grad_hidden = false;
    spec.want_rows = {};
    spec.row_weights.clear();
    spec.depths.clear();
  }
}

// A row of the duty that the open step is known to have; -1: none is.
int64_t FirstAdded(const World& world, const HeadWorld& head, const Duty& duty, int64_t now) {
  using What = Change::What;
  DeviceHead* const on_device = world.On(head);
  const bool changing = head.facts.Changed(
      {What::kStep, What::kZero, What::kLoad, What::kReset, What::kRecreate, What::kWrite}, now);
  if (changing || on_device == nullptr || on_device->generation().broken) return -1;
  const std::map<int64_t, int>& times = on_device->generation().times;
  for (int64_t row = 0; row < duty.rows; ++row) {
    if (times.contains(static_cast<int64_t>(NameOf(duty.id, row)))) return row;
  }
  return -1;
}

}  // namespace

void RunRefused(World& world, HeadWorld& head, const Action& action) {
  std::mt19937_64 random(action.seed);
  const Duty& duty = head.duties[action.number % head.duties.size()];
  const uint64_t step = OpenStepOf(world, head);
  StreamFacts facts{.duty = &duty, .rows = {0, duty.rows}, .accumulates = true};
  facts.opened = world.Tick();
  // A microbatch with the id of a contribution may be of either kind.
  const bool any_kind = duty.kind == Kind::kContribution && random() % 2 == 0;
  if (duty.adds_row_gradients() || any_kind) facts.embedding = kernels::Embedding::kGradients;
  const int64_t added = random() % 4 == 0 ? -1 : FirstAdded(world, head, duty, facts.opened);
  if (added < 0) {
    facts.embedding = random() % 2 == 0 ? kernels::Embedding::kRows : kernels::Embedding::kGradients;
    facts.accumulates = facts.embedding == kernels::Embedding::kGradients;
  }
  StreamSpec spec = SpecOf(head, facts, step);
  if (added < 0) {
    BreakEmbedding(random, head.config, spec);
  } else {
    Contradict(random, added, facts, spec);
  }
  // A contribution may not have the id of a microbatch either.
  const bool contributes = added >= 0 && duty.kind != Kind::kContribution && random() % 4 == 0;
  const auto call = [&] {
    if (!contributes) return world.engine->Open(spec, std::make_shared<Inbox>(&world)).status();
    const ContributionSpec contribution{
        .head = head.name, .step = step, .contribution_id = duty.id, .rows = RowRange{0, 1}};
    return world.engine->OpenContribution(contribution).status();
  };
  const EngineStats before = world.engine->stats();
  const absl::Status status = call();
  const EngineStats after = world.engine->stats();
  world.Note("a call for ", duty.id, " that is to be refused: ", status);
  const auto code = added < 0 ? absl::StatusCode::kInvalidArgument : absl::StatusCode::kFailedPrecondition;
  world.Judge(
      CheckRightlyRefused(status, code, facts, head.facts, world.device, world.plan.setup, world.stopping),
      head.name, ", ", duty.id, added < 0 ? "" : ", in contradiction");
  world.Judge(CheckBookedNothing(before, after), status.message());
}

absl::Status RunContribution(World& world, HeadWorld& head, const Duty& duty, RowRange rows, uint64_t step,
                             bool cut, int64_t* opened) {
  *opened = world.Tick();
  auto contribution = world.engine->OpenContribution({.head = head.name,
                                                      .step = step,
                                                      .contribution_id = duty.id,
                                                      .contribution_rows = RowRange{0, duty.rows},
                                                      .rows = rows});
  world.Note("contribution ", duty.id, " opens ", Text(rows), ": ", contribution.status());
  if (!contribution.ok()) return contribution.status();
  for (int64_t row = rows.begin; row < rows.end;) {
    const int64_t end =
        row + 1 + static_cast<int64_t>(world.scheduler.Draw(static_cast<uint64_t>(rows.end - row)));
    auto ready = std::make_shared<bool>(false);
    const uint64_t ticket = world.engine->AwaitTurn(*contribution, [ready] { *ready = true; });
    if (ticket != 0) {
      world.scheduler.WaitUntil(
          absl::StrCat("contribution ", duty.id, ": its turn"), [&world, &head, ready, cut] {
            return *ready || world.ending() || head.abandoned || (cut && world.scheduler.turns() % 16 == 0);
          });
      if (!*ready && ForgetTurn(*contribution, ticket)) return absl::CancelledError("cut");
      world.scheduler.WaitUntil("a turn that was not forgotten", [ready] { return *ready; });
    }
    std::vector<float> values;
    for (int64_t r = row; r < end; ++r) values.insert(values.end(), {NameOf(duty.id, r), 0.0f});
    const auto bytes =
        absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(values.data()), values.size() * 4);
    const absl::StatusOr<AddedRows> added = world.engine->AddRows(*contribution, {row, end}, bytes);
    world.Note("contribution ", duty.id, " adds ", Text({row, end}), ": ", added.status());
    if (!added.ok()) return added.status();
    row = end;
  }
  return absl::OkStatus();
}

// ---- Administrative calls ----
// With a note of when they were made and what they answered.

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
std::string CheckClosed(World& world, const HeadWorld& head, const StepRequest& request,
                        const StepResult& result, int64_t first, bool whole) {
  const DeviceHead* const on_device = world.On(head);
  if (on_device == nullptr) return "";  // the head was deleted meanwhile
  std::string wrong = "no generation has its rows";
  for (int64_t number = first; number < on_device->generation_number(); ++number) {
    const Generation& generation = world.device.Of(number);
    if (std::string twice = CheckOnce(generation); !generation.broken && !twice.empty()) return twice;
    if (generation.rows != result.rows) continue;
    wrong = whole ? CheckWholeStep(generation, head.duties) : "";
    if (generation.closed_lazily != request.optimizer.lazy_rows) wrong = "its rows are lazy, or should be";
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
    world.Judge(CheckClosed(world, head, request, *result, first, whole), head.name, ", step ", request.step);
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
  const ChangeScope change(world, head, Change::What::kReset);
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
