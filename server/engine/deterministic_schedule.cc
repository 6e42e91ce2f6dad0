// SPDX-License-Identifier: Apache-2.0
// The schedule of deterministic mode (deterministic_schedule.h), and GroupChunk, the chunk that it makes of a
// group of rows.
//
// A group passes through these stages:
// 1. A slice asks for memory (Request). When the group has its turn, or is a repeat, and an area is free,
//    AssemblyFor opens the group's GroupAssembly, and TakeGrants lends the slice its place in the area.
// 2. The slice is copied there and joins the group (Attach).
// 3. When the group is ready, TakeReady takes it, and GroupChunk goes to the device. The turn moves on, so
//    the next group assembles meanwhile.
// 4. The results come (OnResults). If they are good, the next group may go to the device. The area is free
//    when the slices' buffers have come back.
// 5. The group has left the device (OnLeft). If some of its rows are not settled, the turn goes back to it.
#include "server/engine/deterministic_schedule.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kernels/decision.h"
#include "server/engine/errors.h"

namespace lossd::engine {
namespace {

bool Overlap(RowRange a, RowRange b) { return a.begin < b.end && b.begin < a.end; }

}  // namespace

// ---- GroupAssembly ----

GroupAssembly::GroupAssembly(GroupKey key, RowRange rows, size_t area, const Ledger& ledger)
    : key_(key),
      rows_(rows),
      area_(area),
      needed_(static_cast<size_t>(rows.size())),
      coverage_(static_cast<size_t>(rows.size())) {
  Refresh(ledger);
}

bool GroupAssembly::IsFree(RowRange rows) const {
  const auto overlaps = [rows](const Lent& lent) { return Overlap(lent.rows, rows); };
  if (std::any_of(lent_.begin(), lent_.end(), overlaps)) return false;
  if (missing_ > 0) return true;
  const auto first = coverage_.begin() + static_cast<std::ptrdiff_t>(Index(rows.begin));
  return std::all_of(first, first + static_cast<std::ptrdiff_t>(rows.size()),
                     [](int32_t slices) { return slices == 0; });
}

void GroupAssembly::Lend(uint64_t loan, const StreamState* stream, RowRange rows) {
  lent_.push_back({loan, stream, rows});
}

bool GroupAssembly::Return(uint64_t loan) {
  return std::erase_if(lent_, [loan](const Lent& l) { return l.loan == loan; }) > 0;
}

bool GroupAssembly::Attach(std::unique_ptr<SliceWork>& slice, uint64_t arrival) {
  const auto lent = std::find_if(lent_.begin(), lent_.end(), [&slice](const Lent& l) {
    return l.stream == slice->stream.get() && l.rows == slice->rows;
  });
  if (lent == lent_.end()) return false;
  lent_.erase(lent);
  Cover(slice->rows, 1);
  if (slices_.empty()) first_arrival_ = arrival;
  slices_.push_back(std::move(slice));
  last_arrival_ = arrival;
  return true;
}

void GroupAssembly::TakeFailed(std::vector<std::unique_ptr<SliceWork>>& taken) {
  for (auto& slice : slices_) {
    if (!slice->stream->failed()) continue;
    Cover(slice->rows, -1);
    taken.push_back(std::move(slice));
  }
  std::erase(slices_, nullptr);
}

void GroupAssembly::Cover(RowRange rows, int delta) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const size_t i = Index(row);
    missing_ -= needed_[i] && coverage_[i] == 0 ? 1 : 0;
    coverage_[i] += delta;
    missing_ += needed_[i] && coverage_[i] == 0 ? 1 : 0;
  }
}

std::vector<GroupAssembly::Segment> GroupAssembly::Segments() const {
  std::vector<int64_t> cuts = {rows_.begin, rows_.end};
  for (const auto& slice : slices_) {
    cuts.push_back(slice->rows.begin);
    cuts.push_back(slice->rows.end);
  }
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  std::vector<Segment> segments;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) segments.push_back({{cuts[i], cuts[i + 1]}, {}});
  for (const auto& slice : slices_) {
    auto segment = std::lower_bound(segments.begin(), segments.end(), slice->rows.begin,
                                    [](const Segment& s, int64_t row) { return s.rows.begin < row; });
    for (; segment != segments.end() && segment->rows.begin < slice->rows.end; ++segment) {
      segment->slices.push_back(slice.get());
    }
  }
  return segments;
}

void GroupAssembly::Refresh(const Ledger& ledger) {
  ledger.MarkUnsettled(key_.microbatch_id, rows_, absl::MakeSpan(needed_));
  needed_rows_ = std::count(needed_.begin(), needed_.end(), 1);
  missing_ = 0;
  for (size_t i = 0; i < needed_.size(); ++i) missing_ += needed_[i] && coverage_[i] == 0 ? 1 : 0;
}

RowRange GroupAssembly::FirstMissing() const {
  const auto missing = [this](int64_t row) { return needed_[Index(row)] && coverage_[Index(row)] == 0; };
  int64_t begin = rows_.begin;
  while (begin < rows_.end && !missing(begin)) ++begin;
  int64_t end = begin;
  while (end < rows_.end && missing(end)) ++end;
  return {begin, end};
}

// ---- GroupDecisions ----

void GroupDecisions::Note(GroupKey group, const kernels::Chunk& chunk) {
  const kernels::LossOptions& asked = chunk.options;
  // The group may have been computed before, and failed because some rows were not finite.
  decided_.erase(group);
  if (kernels::AsDecided(asked, chunk.gradients, chunk.sample_threshold) == asked) return;
  if (decided_.size() < kMostGroups) decided_[group] = {chunk.gradients, chunk.sample_threshold};
}

kernels::LossOptions GroupDecisions::For(GroupKey group, const kernels::LossOptions& asked) const {
  const auto it = decided_.find(group);
  if (it == decided_.end()) return asked;
  return kernels::AsDecided(asked, it->second.gradients, it->second.sample_threshold);
}

// ---- Sequencer ----

Sequencer::Sequencer(int64_t group_rows, const Ledger* ledger, const ContributionLedger* contributions)
    : group_rows_(group_rows), ledger_(ledger), contributions_(contributions) {}

RowRange Sequencer::RowsOf(GroupKey key) const {
  const int64_t begin = key.group * group_rows_;
  return {begin, std::min(begin + group_rows_, ledger_->MicrobatchRows(key.microbatch_id).value_or(begin))};
}

std::vector<RowRange> Sequencer::Withdrawable(uint64_t microbatch_id, RowRange rows) const {
  // The first row, of this microbatch, whose group does not lie before `turn`; at most rows.end.
  const auto first_from = [&](GroupKey turn) {
    if (microbatch_id != turn.microbatch_id)
      return microbatch_id > turn.microbatch_id ? rows.begin : rows.end;
    return std::clamp(turn.group * group_rows_, rows.begin, rows.end);
  };
  // In this order: groups before turn_, whose rows stay; groups from turn_ to furthest_, which have had a
  // turn before it went back, and whose rows may be withdrawn only if the group has something left to
  // accumulate; groups that had no turn yet.
  std::vector<RowRange> withdrawable;
  const int64_t not_passed = first_from(furthest_);
  for (int64_t begin = first_from(turn_); begin < not_passed;) {
    const GroupKey key = KeyOf(microbatch_id, {begin, begin});
    const int64_t end = std::min((key.group + 1) * group_rows_, not_passed);
    if (ledger_->CountUnsettled(microbatch_id, RowsOf(key)) > 0) withdrawable.push_back({begin, end});
    begin = end;
  }
  // Also if empty: Ledger::Withdraw then forgets a microbatch without rows.
  withdrawable.push_back({not_passed, rows.end});
  return withdrawable;
}

// ---- Sequencer: slices ----

void Sequencer::Request(std::unique_ptr<SliceWork> slice) { waiting_.push_back(std::move(slice)); }

std::vector<Sequencer::Grant> Sequencer::TakeGrants() {
  std::vector<Grant> grants;
  std::vector<std::unique_ptr<SliceWork>> still_waiting;
  for (std::unique_ptr<SliceWork>& slice : waiting_) {
    const RowRange rows = slice->rows;
    GroupAssembly* const group = AssemblyFor(KeyOf(slice->stream->spec().microbatch_id, rows));
    if (group == nullptr || !group->IsFree(rows)) {
      still_waiting.push_back(std::move(slice));
      continue;
    }
    group->Lend(++last_loan_, slice->stream.get(), rows);
    ++areas_[group->area()].loans;
    const int64_t first = group->rows().begin;
    grants.push_back({.slice = std::move(slice),
                      .area = group->area(),
                      .rows = {rows.begin - first, rows.end - first},
                      .loan = last_loan_});
  }
  waiting_ = std::move(still_waiting);
  return grants;
}

GroupAssembly* Sequencer::AssemblyFor(GroupKey key) {
  if (key > turn_ || on_device_.contains(key)) return nullptr;
  if (const auto it = open_.find(key); it != open_.end()) return it->second.get();
  const bool repeat = key < turn_;
  const auto free_areas =
      std::count_if(std::begin(areas_), std::end(areas_), [](const Area& a) { return a.free(); });
  // One area stays free for the group in turn, if that group has none yet.
  const bool leave_one = repeat && !open_.contains(turn_);
  if (free_areas < (leave_one ? 2 : 1)) return nullptr;
  Area* const area =
      std::find_if(std::begin(areas_), std::end(areas_), [](const Area& a) { return a.free(); });
  area->taken = true;
  auto group =
      std::make_unique<GroupAssembly>(key, RowsOf(key), static_cast<size_t>(area - areas_), *ledger_);
  return open_.emplace(key, std::move(group)).first->second.get();
}

bool Sequencer::Attach(std::unique_ptr<SliceWork>& slice, uint64_t arrival) {
  const auto it = open_.find(KeyOf(slice->stream->spec().microbatch_id, slice->rows));
  return it != open_.end() && it->second->Attach(slice, arrival);
}

void Sequencer::Return(size_t area, uint64_t loan) {
  --areas_[area].loans;
  for (auto& [key, group] : open_) {
    if (group->area() == area) group->Return(loan);
  }
  CloseIdle();
}

void Sequencer::CloseIdle() {
  // This includes the group in turn and groups beyond it: after a withdrawal their rows may have changed.
  std::erase_if(open_, [this](const auto& entry) {
    const GroupAssembly& group = *entry.second;
    const bool idle = group.IsQuiet() && group.slices().empty();
    if (idle) areas_[group.area()].taken = false;
    return idle;
  });
}

DroppedSlices Sequencer::TakeFailed() {
  DroppedSlices dropped;
  for (auto& [key, group] : open_) group->TakeFailed(dropped.queued);
  std::erase_if(waiting_, [&dropped](std::unique_ptr<SliceWork>& slice) {
    const bool failed = slice->stream->failed();
    if (failed) dropped.waiting.push_back(std::move(slice));
    return failed;
  });
  CloseIdle();
  return dropped;
}

// ---- Sequencer: turns ----

void Sequencer::Advance() {
  while (const std::optional<GroupKey> next = AfterTurn()) turn_ = *next;
  furthest_ = std::max(furthest_, turn_);
}

std::optional<GroupKey> Sequencer::AfterTurn() const {
  const uint64_t id = turn_.microbatch_id;
  const auto rows = ledger_->MicrobatchRows(id);
  const bool added = contributions_->Contains(id) && contributions_->Complete(id);
  if (!rows.has_value() && !added) return std::nullopt;  // nothing with this id is complete
  if (added || turn_.group * group_rows_ >= *rows) return GroupKey{id + 1, 0};
  if (ledger_->CountUnsettled(id, RowsOf(turn_)) == 0) return GroupKey{id, turn_.group + 1};
  return std::nullopt;
}

void Sequencer::OnDeclared(uint64_t microbatch_id) {
  for (auto& [key, group] : open_) {
    if (key.microbatch_id == microbatch_id) group->Refresh(*ledger_);
  }
  if (microbatch_id == turn_.microbatch_id) Advance();
}

void Sequencer::Clear() {
  for (auto& [key, group] : open_) areas_[group->area()].taken = false;
  open_.clear();
  turn_ = furthest_ = {};
}

bool Sequencer::IsReady(const GroupAssembly& group) const {
  if (group.slices().empty()) return false;
  if (IsRepeat(group)) return group.IsQuiet();
  if (group.key() > turn_) return false;
  // All groups that are accumulated on the device have good results. Otherwise one of them may get its turn
  // back, and this group would be accumulated before it.
  const bool may_follow =
      std::all_of(on_device_.begin(), on_device_.end(), [](const auto& entry) { return entry.second; });
  return may_follow && group.IsComplete();
}

bool Sequencer::HasReady(uint64_t before) const {
  return std::any_of(open_.begin(), open_.end(), [&](const auto& entry) {
    return IsReady(*entry.second) && entry.second->last_arrival() < before;
  });
}

std::unique_ptr<GroupAssembly> Sequencer::TakeReady() {
  auto it = open_.end();
  for (auto other = open_.begin(); other != open_.end(); ++other) {
    const bool first = it == open_.end() || other->second->first_arrival() < it->second->first_arrival();
    if (first && IsReady(*other->second)) it = other;
  }
  if (it == open_.end()) return nullptr;
  std::unique_ptr<GroupAssembly> group = std::move(it->second);
  open_.erase(it);
  if (group->key() == turn_) {
    on_device_.emplace(turn_, false);
    ++turn_.group;
    Advance();
  }
  return group;
}

void Sequencer::OnResultsGood(const GroupAssembly& group) {
  if (const auto it = on_device_.find(group.key()); it != on_device_.end()) it->second = true;
}

void Sequencer::ReleaseArea(const GroupAssembly& group) { areas_[group.area()].taken = false; }

void Sequencer::OnLeft(const GroupAssembly& group) {
  if (on_device_.erase(group.key()) == 0) return;
  // Some rows had no good result: the group gets its turn again.
  if (ledger_->CountUnsettled(group.key().microbatch_id, group.rows()) > 0)
    turn_ = std::min(turn_, group.key());
  Advance();
}

// ---- Sequencer: for people ----

std::string Sequencer::WaitsFor() const {
  if (waiting_.empty() && attached_slices() == 0) return "";
  if (contributions_->Contains(turn_.microbatch_id))
    return contributions_->DescribeMissing(turn_.microbatch_id);
  const auto it = open_.find(turn_);
  RowRange missing = it != open_.end() ? it->second->FirstMissing() : RowsOf(turn_);
  if (missing.size() > 0) return absl::StrCat("microbatch ", turn_.microbatch_id, ", rows ", Text(missing));
  return absl::StrCat("microbatch ", turn_.microbatch_id);
}

bool Sequencer::IsWaiting(const StreamState& stream) const {
  const auto of_stream = [&stream](const auto& slice) { return slice->stream.get() == &stream; };
  if (std::any_of(waiting_.begin(), waiting_.end(), of_stream)) return true;
  return std::any_of(open_.begin(), open_.end(), [&](const auto& entry) {
    const auto& slices = entry.second->slices();
    return std::any_of(slices.begin(), slices.end(), of_stream);
  });
}

int64_t Sequencer::attached_slices() const {
  int64_t slices = 0;
  for (const auto& [key, group] : open_) slices += static_cast<int64_t>(group->slices().size());
  return slices;
}

// ---- The chunk of a group ----

namespace {

// The declared values of the rows from `index` on; null if the declaration has none of this kind.
template <typename T>
const T* DeclaredAt(const std::vector<T>& values, size_t index) {
  return values.empty() ? nullptr : values.data() + index;
}

bool HasTargets(absl::Span<const int32_t> targets) {
  return std::any_of(targets.begin(), targets.end(), [](int32_t t) { return t != kernels::kIgnoredTarget; });
}

// The chunk of one group, with a segment for each run of rows that the same slices hold. A run of rows that
// no slice sent again is computed as zeros, unless none of its rows has a target.
struct GroupChunk final : ChunkWork {
  GroupChunk(DeterministicSchedule* schedule, std::unique_ptr<GroupAssembly> assembly, Ledger& ledger,
             uint8_t* area);

  void Prepare() override;
  void OnComputed(const kernels::Chunk& chunk) override;
  void OnResults(bool all_good) override { schedule_->OnResults(*group_, all_good); }
  void OnLeft() override { schedule_->OnLeft(*group_); }
  // All groups behind this one wait for it, so a failure affects every stream that accumulates.
  bool Affects(const StreamState& stream) const override { return stream.spec().accumulate_gradients; }

 private:
  void AddSegment(const GroupAssembly::Segment& piece, RowWants wants, uint8_t* area);
  // The input for rows that no slice holds. It takes what all streams of the microbatch agree on from any one
  // of them.
  kernels::Slice GapInput(RowRange rows, size_t index, uint8_t* memory) const;

  DeterministicSchedule* const schedule_;
  const std::unique_ptr<GroupAssembly> group_;
  RowValues declared_;                     // [rows], what the ledger knows of the rows
  std::vector<uint8_t> accumulate_;        // [rows], 1: this chunk accumulates the row
  std::vector<absl::Span<uint8_t>> gaps_;  // memory of the rows that no slice sent, which Prepare zeroes
};

GroupChunk::GroupChunk(DeterministicSchedule* schedule, std::unique_ptr<GroupAssembly> assembly,
                       Ledger& ledger, uint8_t* area)
    : schedule_(schedule), group_(std::move(assembly)) {
  const uint64_t id = group_->key().microbatch_id;
  rows = static_cast<size_t>(group_->rows().size());
  declared_ = ledger.Contents(id, group_->rows());
  accumulate_.resize(rows);
  // accumulate_[i] becomes 1 for the rows that are not settled. In a repeat it is 0 for all rows.
  ledger.Reserve(id, group_->rows(), absl::MakeSpan(accumulate_));
  accumulates = true;
  // Decides which of several devices computes the chunk; the same each time.
  turn = id + static_cast<uint64_t>(group_->key().group);
  const std::vector<GroupAssembly::Segment> pieces = group_->Segments();
  slices = group_->TakeSlices();
  hidden_dtype = slices.front()->stream->spec().hidden_dtype;
  RowWants wants;
  for (const auto& slice : slices) {
    slice->index = static_cast<size_t>(slice->rows.begin - group_->rows().begin);
    wants.Add(slice->stream->spec().want_rows);
  }
  for (const GroupAssembly::Segment& piece : pieces) AddSegment(piece, wants, area);
  options = slices.front()->stream->spec().options;
  if (!gaps_.empty()) options = schedule_->OptionsForAPart(*group_, options);
}

void GroupChunk::AddSegment(const GroupAssembly::Segment& piece, RowWants wants, uint8_t* area) {
  const auto index = static_cast<size_t>(piece.rows.begin - group_->rows().begin);
  const auto piece_rows = static_cast<size_t>(piece.rows.size());
  const StreamState& stream = piece.slices.empty() ? *slices.front()->stream : *piece.slices.front()->stream;
  uint8_t* const memory = area + stream.RowBytes(static_cast<int64_t>(index));
  Segment segment{.microbatch_id = group_->key().microbatch_id,
                  .rows = piece.rows,
                  .index = index,
                  .slices = piece.slices,
                  .wants = wants};
  if (piece.slices.empty()) {
    if (!HasTargets(absl::MakeSpan(declared_.targets).subspan(index, piece_rows))) return;
    gaps_.emplace_back(memory, static_cast<size_t>(stream.RowBytes(piece.rows.size())));
    segment.input = GapInput(piece.rows, index, memory);
  } else {
    segment.input = InputOf(stream, piece.rows, memory);
  }
  segment.input.accumulate = accumulate_.data() + index;
  segments.push_back(std::move(segment));
}

kernels::Slice GroupChunk::GapInput(RowRange gap, size_t index, uint8_t* memory) const {
  const StreamState& stream = *slices.front()->stream;
  kernels::Slice slice;
  slice.stands_in = true;
  slice.rows = gap.size();
  slice.hidden = memory;
  slice.targets = DeclaredAt(declared_.targets, index);
  slice.row_weights = DeclaredAt(declared_.row_weights, index);
  slice.grad_scale = stream.grad_scale(gap.begin);  // any scale will do: the gap adds nothing
  slice.grad_loss = DeclaredAt(declared_.grad_loss, index);
  slice.grad_lse = DeclaredAt(declared_.grad_lse, index);
  slice.grad_entropy = DeclaredAt(declared_.grad_entropy, index);
  slice.advantages = DeclaredAt(declared_.numbers.advantages, index);
  slice.old_logprobs = DeclaredAt(declared_.numbers.old_logprobs, index);
  slice.ref_logprobs = DeclaredAt(declared_.numbers.ref_logprobs, index);
  if (stream.spec().options.has_soft_targets()) {
    // Of the soft targets only the row's target, with the weight of all of them. It affects the gradient unit
    // of the chunk: the common factor by which the gradients of all its rows, also of the sent ones, are
    // divided when they are stored.
    slice.target_count = 1;
    slice.target_classes = slice.targets;
    slice.target_weights = DeclaredAt(declared_.digest.sums, index);
  }
  slice.grad_hidden = stream.spec().want_grad_hidden ? memory : nullptr;
  NameSamples(stream, gap, slice);
  return slice;
}

// Only a chunk with all rows of the group, which accumulates some of them, makes the group's decision.
void GroupChunk::OnComputed(const kernels::Chunk& chunk) {
  const bool is_repeat =
      std::all_of(accumulate_.begin(), accumulate_.end(), [](uint8_t row) { return row == 0; });
  if (gaps_.empty() && !is_repeat) schedule_->OnComputed(*group_, chunk);
}

void GroupChunk::Prepare() {
  for (absl::Span<uint8_t> gap : gaps_) std::memset(gap.data(), 0, gap.size());
}

constexpr auto kAreas = static_cast<int64_t>(Sequencer::kAreas);

// Bytes of a row in the widest dtype, so that groups have the same rows in all dtypes.
int64_t RowBytesOf(int64_t hidden_size) { return hidden_size * static_cast<int64_t>(sizeof(float)); }

}  // namespace

// ---- GroupAreas ----

int64_t GroupAreas::GroupRows(int64_t hidden_size, int64_t slice_rows, int64_t max_bytes) {
  return std::clamp<int64_t>(max_bytes / RowBytesOf(hidden_size) / kAreas, 1, slice_rows);
}

absl::StatusOr<GroupAreas> GroupAreas::Allocate(kernels::Backend* backend, int64_t hidden_size,
                                                int64_t slice_rows, int64_t max_bytes) {
  const int64_t row_bytes = RowBytesOf(hidden_size);
  const int64_t group_rows = GroupRows(hidden_size, slice_rows, max_bytes);
  auto memory = backend->AllocateStaging(kAreas * group_rows * row_bytes);
  if (!memory.ok()) return memory.status();
  return GroupAreas{
      .memory = *std::move(memory), .group_rows = group_rows, .area_bytes = group_rows * row_bytes};
}

// ---- DeterministicSchedule ----

DeterministicSchedule::DeterministicSchedule(EngineContext* context, GroupAreas areas, SliceLimits limits,
                                             int64_t chunk_rows, std::shared_ptr<OpenStep> step,
                                             MemoryReady memory_ready, WorkQueue::ValuesOf values)
    : context_(context),
      areas_(std::move(areas)),
      limits_{.max_rows = areas_.group_rows,
              .max_bytes = limits.max_bytes,
              .max_bytes_in_place = areas_.area_bytes,
              .row_grid = areas_.group_rows},
      step_(std::move(step)),
      memory_ready_(std::move(memory_ready)),
      sequencer_(areas_.group_rows, &step_->ledger(), &step_->contributions()),
      arrival_(limits, chunk_rows, context->staging.get(), &step_->ledger(), memory_ready_,
               std::move(values)) {}

absl::Status DeterministicSchedule::SetLimits(const SliceLimits& limits, int64_t chunk_rows) {
  if (limits.max_rows < areas_.group_rows) {
    return absl::FailedPreconditionError(
        absl::StrCat("a deterministic server groups rows by ", areas_.group_rows,
                     ", and with these shares the head computes ", limits.max_rows,
                     " at a time: load a checkpoint into a new head with these shares"));
  }
  return arrival_.SetLimits(limits, chunk_rows);
}

// ---- DeterministicSchedule: memory ----

bool DeterministicSchedule::FindMemory(std::unique_ptr<SliceWork>& slice) {
  const SliceWork* const own = slice.get();
  sequencer_.Request(std::move(slice));
  return Advance(own, &slice);
}

bool DeterministicSchedule::Advance(const SliceWork* own, std::unique_ptr<SliceWork>* own_slice) {
  bool own_granted = false;
  for (Sequencer::Grant& grant : sequencer_.TakeGrants()) {
    grant.slice->buffer = BufferFor(grant);
    if (grant.slice.get() == own) {
      *own_slice = std::move(grant.slice);
      own_granted = true;
    } else {
      context_->notifier.Post(
          [ready = memory_ready_, slice = std::move(grant.slice)]() mutable { ready(std::move(slice)); });
    }
  }
  CallTurns(/*all=*/false);
  return own_granted;
}

StagingBuffer DeterministicSchedule::BufferFor(const Sequencer::Grant& grant) {
  context_->mutex.AssertHeld();
  const StreamState& stream = *grant.slice->stream;
  ++context_->area_buffers_lent;
  // The buffer may outlive the head, so it keeps the memory alive. The engine only waits until it comes back.
  return StagingBuffer(areas_.At(grant.area) + stream.RowBytes(grant.rows.begin),
                       stream.RowBytes(grant.rows.size()),
                       [context = context_, self = weak_from_this(), memory = areas_.memory,
                        area = grant.area, loan = grant.loan]() mutable {
                         memory.reset();
                         if (const auto schedule = self.lock()) {
                           absl::MutexLock lock(&context->mutex);
                           schedule->sequencer_.Return(area, loan);
                           schedule->Advance();
                           context->loop.Wake();
                         }
                         absl::MutexLock lock(&context->mutex);
                         // Last, because the engine may be destroyed after this.
                         --context->area_buffers_lent;
                       });
}

void DeterministicSchedule::Queue(std::unique_ptr<SliceWork> slice) {
  const bool attached = sequencer_.Attach(slice, ++arrivals_);
  assert(attached);  // its stream has not failed, so its loan still exists
  (void)attached;
  Advance();  // slices may have waited for the places of the same rows
}

DroppedSlices DeterministicSchedule::TakeFailed() {
  DroppedSlices dropped = sequencer_.TakeFailed();
  DroppedSlices others = arrival_.TakeFailed();
  for (auto& slice : others.queued) dropped.queued.push_back(std::move(slice));
  Advance();  // an area may have come free
  return dropped;
}

// ---- DeterministicSchedule: the device ----

void DeterministicSchedule::Push(Operation* operation) {
  operation->arrival = ++arrivals_;
  arrival_.Push(operation);
}

ScheduledWork DeterministicSchedule::TakeNext(const DeviceLoad& load, bool head_is_idle) {
  const Operation* const operation = arrival_.FrontOperation();
  // An operation waits for the groups that were ready before it came.
  if (operation != nullptr && !sequencer_.HasReady(operation->arrival))
    return arrival_.TakeNext(load, head_is_idle);
  if (!load.accepts_chunk()) return {};
  // Chunks by arrival that stand behind an operation wait for it, and the operation waits for the groups.
  const auto take_chunk = [&] {
    return operation == nullptr ? arrival_.TakeNext(load, head_is_idle) : ScheduledWork();
  };
  const bool chunk_first = group_was_last_;
  ScheduledWork next = chunk_first ? take_chunk() : TakeGroup();
  if (!std::holds_alternative<std::monostate>(next)) {
    group_was_last_ = !chunk_first;
    return next;
  }
  next = chunk_first ? TakeGroup() : take_chunk();
  if (!std::holds_alternative<std::monostate>(next)) group_was_last_ = chunk_first;
  return next;
}

ScheduledWork DeterministicSchedule::TakeGroup() {
  std::unique_ptr<GroupAssembly> group = sequencer_.TakeReady();
  if (group == nullptr) return {};
  uint8_t* const area = areas_.At(group->area());
  auto chunk = std::make_unique<GroupChunk>(this, std::move(group), step_->ledger(), area);
  Advance();  // the next group assembles while this one is computed
  return chunk;
}

kernels::LossOptions DeterministicSchedule::OptionsForAPart(const GroupAssembly& group,
                                                            const kernels::LossOptions& asked) const {
  return decisions_.For(group.key(), asked);
}

void DeterministicSchedule::OnComputed(const GroupAssembly& group, const kernels::Chunk& chunk) {
  decisions_.Note(group.key(), chunk);
}

void DeterministicSchedule::OnResults(const GroupAssembly& group, bool all_good) {
  if (all_good) sequencer_.OnResultsGood(group);
  sequencer_.ReleaseArea(group);
  Advance();
}

void DeterministicSchedule::OnLeft(const GroupAssembly& group) {
  sequencer_.OnLeft(group);
  Advance();
}

Backlog DeterministicSchedule::backlog() const {
  Backlog backlog = arrival_.backlog();
  backlog.queued_slices += sequencer_.attached_slices();
  backlog.waiting_slices = sequencer_.waiting_slices() + static_cast<int64_t>(turn_waiters_.size());
  backlog.waits_for = sequencer_.WaitsFor();
  return backlog;
}

// ---- DeterministicSchedule: news of the open step ----

void DeterministicSchedule::OnDeclared(uint64_t microbatch_id) {
  sequencer_.OnDeclared(microbatch_id);
  Advance();
}

void DeterministicSchedule::OnContribution() {
  sequencer_.OnContribution();  // a contribution may have no rows to add
  Advance();
}

void DeterministicSchedule::OnRestart() {
  sequencer_.Clear();
  decisions_.Clear();
  CallTurns(/*all=*/true);
}

// ---- DeterministicSchedule: turns of contributions ----

bool DeterministicSchedule::HasTurn(uint64_t contribution_id) const {
  return contribution_id <= sequencer_.turn().microbatch_id;
}

bool DeterministicSchedule::AwaitTurn(uint64_t contribution_id, uint64_t ticket,
                                      absl::AnyInvocable<void()> ready) {
  if (HasTurn(contribution_id)) return false;
  turn_waiters_.push_back({contribution_id, ticket, std::move(ready)});
  return true;
}

bool DeterministicSchedule::ForgetTurn(uint64_t ticket) {
  return std::erase_if(turn_waiters_, [ticket](const TurnWaiter& w) { return w.ticket == ticket; }) > 0;
}

void DeterministicSchedule::CallTurns(bool all) {
  std::erase_if(turn_waiters_, [&](TurnWaiter& waiter) {
    const bool call = all || HasTurn(waiter.contribution_id);
    if (call) context_->notifier.Post(std::move(waiter.ready));
    return call;
  });
}

}  // namespace lossd::engine
