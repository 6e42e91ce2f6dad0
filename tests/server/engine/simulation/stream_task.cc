// SPDX-License-Identifier: Apache-2.0
// One stream of a trainer: opened, fed and read, with all that a client may do wrong or leave undone.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

#include "server/engine/errors.h"
#include "tests/server/engine/simulation/world.h"

namespace lossd::engine::simulation {
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
  static constexpr const char* kKinds[] = {"accumulating", "loss-only", "retaining", "backward"};
  return absl::StrCat("stream ", facts_.number, " (", kKinds[static_cast<size_t>(kind_)], ", ", head_.name,
                      ", microbatch ", facts_.duty->id, ", rows ", Text(facts_.rows), ")");
}

// Three share the server.
std::string StreamTask::Peer() const { return absl::StrCat("peer ", facts_.number % 3); }

// ---- Opening ----

StreamSpec StreamTask::Spec(uint64_t step) const {
  const Duty& duty = *facts_.duty;
  StreamSpec spec;
  spec.head = head_.name;
  spec.peer = Peer();
  spec.step = step;
  spec.microbatch_id = duty.id;
  spec.microbatch_rows = duty.rows;
  spec.rows = facts_.rows;
  spec.hidden_dtype = kernels::DType::kFloat32;
  spec.accumulate_gradients = facts_.accumulates;
  spec.want_grad_hidden = duty.want_grad_hidden && !facts_.retains;
  spec.reduction = facts_.retains ? Reduction::kNone : Reduction::kSum;
  spec.retain = facts_.retains;
  spec.want_rows.loss = spec.want_rows.lse = true;
  const auto begin = facts_.rows.begin, end = facts_.rows.end;
  spec.targets.assign(duty.targets.begin() + begin, duty.targets.begin() + end);
  if (!duty.row_weights.empty())
    spec.row_weights.assign(duty.row_weights.begin() + begin, duty.row_weights.begin() + end);
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
    const int64_t most = std::min({limits.max_rows, facts_.rows.end - row, limits.NextGridRow(row) - row});
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
  if (!facts_.backward) {
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

}  // namespace lossd::engine::simulation
