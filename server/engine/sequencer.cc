// SPDX-License-Identifier: Apache-2.0
#include "server/engine/sequencer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/errors.h"

namespace lossd::engine {

Sequencer::Sequencer(int64_t group_rows, const Ledger* ledger, const ContributionLedger* contributions)
    : group_rows_(group_rows), ledger_(ledger), contributions_(contributions) {}

RowRange Sequencer::RowsOf(GroupKey key) const {
  const int64_t begin = key.group * group_rows_;
  return {begin, std::min(begin + group_rows_, ledger_->MicrobatchRows(key.microbatch_id).value_or(begin))};
}

std::vector<RowRange> Sequencer::Withdrawable(uint64_t microbatch_id, RowRange rows) const {
  // The first row of the first group of the microbatch that is not before `turn`.
  const auto first_from = [&](GroupKey turn) {
    if (microbatch_id != turn.microbatch_id)
      return microbatch_id > turn.microbatch_id ? rows.begin : rows.end;
    return std::clamp(turn.group * group_rows_, rows.begin, rows.end);
  };
  std::vector<RowRange> withdrawable;
  const int64_t not_passed = first_from(furthest_);
  for (int64_t begin = first_from(turn_); begin < not_passed;) {
    const GroupKey key = KeyOf(microbatch_id, {begin, begin});
    const int64_t end = std::min((key.group + 1) * group_rows_, not_passed);
    if (ledger_->CountUnsettled(microbatch_id, RowsOf(key)) > 0) withdrawable.push_back({begin, end});
    begin = end;
  }
  withdrawable.push_back({not_passed, rows.end});  // if empty: with it goes a microbatch without rows
  return withdrawable;
}

// ---- Slices ----

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
  // Also in turn or beyond it: after a withdrawal its rows may be unsettled again, or others.
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

// ---- Turns ----

void Sequencer::Advance() {
  while (const std::optional<GroupKey> next = AfterTurn()) turn_ = *next;
  furthest_ = std::max(furthest_, turn_);
}

std::optional<GroupKey> Sequencer::AfterTurn() const {
  const uint64_t id = turn_.microbatch_id;
  const auto rows = ledger_->MicrobatchRows(id);
  const bool added = contributions_->Contains(id) && contributions_->Complete(id);
  if (!rows.has_value() && !added) return std::nullopt;
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
  if (ledger_->CountUnsettled(group.key().microbatch_id, group.rows()) > 0)
    turn_ = std::min(turn_, group.key());
  Advance();
}

// ---- For people ----

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

}  // namespace lossd::engine
