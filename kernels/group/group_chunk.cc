// SPDX-License-Identifier: Apache-2.0
// The division of a chunk among members, and the combination of their results (group_chunk.h).
#include "kernels/group/group_chunk.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kernels/backend.h"

namespace lossd::kernels {
namespace {

// For each member, the rows of the slices whose home it is.
std::vector<int64_t> RowsAtHome(absl::Span<const Slice> slices, int members, absl::Span<const int> homes) {
  std::vector<int64_t> rows(static_cast<size_t>(members), 0);
  for (size_t i = 0; i < homes.size(); ++i) {
    if (homes[i] >= 0) rows[static_cast<size_t>(homes[i])] += slices[i].rows;
  }
  return rows;
}

// The member that computes a chunk that is not divided.
int SoleMember(absl::Span<const Slice> slices, int members, int first_member, absl::Span<const int> homes) {
  const std::vector<int64_t> rows = RowsAtHome(slices, members, homes);
  const auto most = std::max_element(rows.begin(), rows.end());
  return *most == 0 ? first_member : static_cast<int>(most - rows.begin());
}

// The member that computes each slice.
std::vector<int> MembersOf(absl::Span<const Slice> slices, int members, int first_member,
                           absl::Span<const int> homes) {
  std::vector<int> member_of(slices.size(), 0);
  std::vector<int64_t> rows = RowsAtHome(slices, members, homes);
  // Puts `rows` into the order of the members from first_member on.
  std::rotate(rows.begin(), rows.begin() + first_member, rows.end());
  std::vector<size_t> largest_first(slices.size());
  std::iota(largest_first.begin(), largest_first.end(), size_t{0});
  std::stable_sort(largest_first.begin(), largest_first.end(),
                   [&](size_t a, size_t b) { return slices[a].rows > slices[b].rows; });
  for (const size_t i : largest_first) {
    if (!homes.empty() && homes[i] >= 0) {
      member_of[i] = homes[i];
      continue;
    }
    const auto least = std::min_element(rows.begin(), rows.end());
    *least += slices[i].rows;
    member_of[i] = (first_member + static_cast<int>(least - rows.begin())) % members;
  }
  return member_of;
}

// Appends the parts of one member: its slices in order, divided so that no part has more than member_rows
// rows.
void AddParts(absl::Span<const Slice> slices, const std::vector<int>& member_of, int member,
              int64_t member_rows, std::vector<ChunkPart>& parts) {
  ChunkPart part{.member = member};
  for (size_t i = 0; i < slices.size(); ++i) {
    if (member_of[i] != member) continue;
    if (!part.slices.empty() && part.rows + slices[i].rows > member_rows) {
      parts.push_back(std::move(part));
      part = {.member = member};
    }
    part.slices.push_back(i);
    part.rows += slices[i].rows;
  }
  if (!part.slices.empty()) parts.push_back(std::move(part));
}

}  // namespace

std::vector<ChunkPart> Divide(absl::Span<const Slice> slices, const DivisionLimits& limits, int first_member,
                              absl::Span<const int> homes) {
  if (slices.empty()) return {{.member = first_member}};
  const int64_t rows = std::accumulate(slices.begin(), slices.end(), int64_t{0},
                                       [](int64_t sum, const Slice& slice) { return sum + slice.rows; });
  std::vector<int> member_of;
  if (rows < limits.least_rows && rows <= limits.member_rows) {
    member_of.assign(slices.size(), SoleMember(slices, limits.members, first_member, homes));
  } else {
    member_of = MembersOf(slices, limits.members, first_member, homes);
  }
  std::vector<ChunkPart> parts;
  for (int member = 0; member < limits.members; ++member) {
    AddParts(slices, member_of, member, limits.member_rows, parts);
  }
  return parts;
}

namespace {

// The rows that are neither ignored nor absent. Only they show how gradients were computed.
int64_t RowsThatCount(const std::vector<Slice>& slices) {
  int64_t rows = 0;
  for (const Slice& slice : slices) {
    for (int64_t row = 0; row < slice.rows; ++row) {
      rows += slice.targets[row] != kIgnoredTarget && !IsAbsent(slice, row) ? 1 : 0;
    }
  }
  return rows;
}

}  // namespace

GroupChunk::GroupChunk(Chunk* whole, ChunkCallbacks callbacks, std::vector<ChunkPart> parts)
    : whole_(whole),
      callbacks_(std::move(callbacks)),
      divided_(std::move(parts)),
      parts_(divided_.size()),
      without_results_(divided_.size()),
      unfinished_(divided_.size()) {
  for (size_t i = 0; i < parts_.size(); ++i) {
    Part& part = parts_[i];
    for (const size_t slice : divided_[i].slices) part.slices.push_back(whole->slices[slice]);
    part.chunk.options = whole->options;
    part.chunk.hidden_dtype = whole->hidden_dtype;
    part.chunk.accumulate_gradients = whole->accumulate_gradients;
    part.chunk.independent = whole->independent;
    part.chunk.turn = whole->turn;
    part.chunk.retained = whole->retained;
    part.chunk.slices = absl::MakeSpan(part.slices);
  }
}

GroupChunk::GroupChunk(absl::Status refusal, ChunkCallbacks callbacks)
    : whole_(nullptr),
      callbacks_(std::move(callbacks)),
      refusal_(std::move(refusal)),
      without_results_(0),
      unfinished_(0) {}

bool GroupChunk::OnResults(size_t part, const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  parts_[part].results = status;
  return --without_results_ == 0;
}

bool GroupChunk::OnDone(size_t part, const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  parts_[part].done = status;
  return --unfinished_ == 0;
}

void GroupChunk::CallResults() {
  absl::Status status = refusal_;
  for (const Part& part : parts_) status.Update(part.results);
  if (status.ok()) {
    CollectSlices();
    CollectChoices();
  }
  callbacks_.on_results(std::move(status));
}

void GroupChunk::CallDone() { callbacks_.on_done(DoneStatus()); }

void GroupChunk::CollectSlices() {
  // The loop runs backwards, so that the first part that has a slice writes the slice's results last.
  for (size_t i = parts_.size(); i-- > 0;) {
    for (size_t j = 0; j < parts_[i].slices.size(); ++j) {
      Slice& slice = whole_->slices[divided_[i].slices[j]];
      slice.first_nonfinite_row = parts_[i].slices[j].first_nonfinite_row;
      slice.sums = parts_[i].slices[j].sums;
    }
  }
}

void GroupChunk::CollectChoices() {
  std::vector<int64_t> rows;
  for (const Part& part : parts_) rows.push_back(RowsThatCount(part.slices));
  const auto largest = std::max_element(rows.begin(), rows.end()) - rows.begin();
  const Chunk& said = parts_[static_cast<size_t>(largest)].chunk;
  whole_->choices = said.choices;
  whole_->gradients = said.gradients;
  whole_->sample_threshold = said.sample_threshold;
}

absl::Status GroupChunk::DoneStatus() const {
  absl::Status status = refusal_;
  absl::Status results = refusal_;
  bool accumulated = false;
  for (const Part& part : parts_) {
    status.Update(part.done);
    results.Update(part.results);
    accumulated = accumulated || (part.results.ok() && part.chunk.accumulate_gradients);
  }
  if (results.ok() || !accumulated) return status;
  return absl::DataLossError(
      absl::StrCat("some of the devices that share a chunk failed: ", results.message()));
}

void ChunkOrder::Add(std::shared_ptr<GroupChunk> chunk) {
  const bool refused = chunk->parts() == 0;
  {
    absl::MutexLock lock(&mutex_);
    entries_.push_back({.chunk = std::move(chunk), .has_results = refused, .is_done = refused});
  }
  if (refused) Advance();
}

void ChunkOrder::OnResults(const GroupChunk& chunk) {
  {
    absl::MutexLock lock(&mutex_);
    EntryOf(chunk).has_results = true;
  }
  Advance();
}

void ChunkOrder::OnDone(const GroupChunk& chunk) {
  {
    absl::MutexLock lock(&mutex_);
    EntryOf(chunk).is_done = true;
  }
  Advance();
}

void ChunkOrder::WaitUntilIdle() {
  absl::MutexLock lock(&mutex_);
  const auto is_idle = [this] {
    mutex_.AssertHeld();
    return entries_.empty() && !calling_;
  };
  mutex_.Await(absl::Condition(&is_idle));
}

ChunkOrder::Entry& ChunkOrder::EntryOf(const GroupChunk& chunk) {
  return *std::find_if(entries_.begin(), entries_.end(),
                       [&chunk](const Entry& entry) { return entry.chunk.get() == &chunk; });
}

void ChunkOrder::Advance() {
  absl::MutexLock lock(&mutex_);
  if (calling_) return;
  calling_ = true;
  while (CallNext()) {
  }
  calling_ = false;
}

bool ChunkOrder::CallNext() {
  std::shared_ptr<GroupChunk> chunk;
  const bool results = told_ < entries_.size() && entries_[told_].has_results;
  if (results) {
    chunk = entries_[told_++].chunk;
  } else if (told_ > 0 && entries_.front().is_done) {
    chunk = std::move(entries_.front().chunk);
    entries_.pop_front();
    --told_;
  } else {
    return false;
  }
  mutex_.Unlock();
  if (results) {
    chunk->CallResults();
  } else {
    chunk->CallDone();
  }
  chunk.reset();
  mutex_.Lock();
  return true;
}

}  // namespace lossd::kernels
