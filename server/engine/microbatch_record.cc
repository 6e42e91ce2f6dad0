// SPDX-License-Identifier: Apache-2.0
#include "server/engine/microbatch_record.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "kernels/backend.h"
#include "server/engine/errors.h"

namespace lossd::engine {
namespace {

constexpr int64_t kRowBytes = sizeof(int32_t) + sizeof(uint8_t);  // target and state

// Finds nothing, and fast, in the usual case.
template <typename T>
bool SameBytes(const T* a, const T* b, size_t count) {
  return std::memcmp(a, b, count * sizeof(T)) == 0;
}

}  // namespace

// ---- Segments ----

int64_t MicrobatchRecord::Segment::settled_rows() const {
  return std::count_if(states.begin(), states.end(), IsSettled);
}

int64_t MicrobatchRecord::Segment::bytes() const {
  int64_t row_bytes = kRowBytes;
  for (const std::vector<float>& values : floats) row_bytes += values.empty() ? 0 : sizeof(float);
  return kSegmentBytes + rows() * row_bytes;
}

MicrobatchRecord::Segment MicrobatchRecord::Segment::Part(size_t first, size_t count) const {
  const auto part = [first, count](const auto& values) {
    const auto begin = values.begin() + static_cast<std::ptrdiff_t>(values.empty() ? 0 : first);
    const auto size = static_cast<std::ptrdiff_t>(values.empty() ? 0 : count);
    return std::remove_cvref_t<decltype(values)>(begin, begin + size);
  };
  Segment result{.targets = part(targets), .states = part(states)};
  for (size_t kind = 0; kind < kFloats; ++kind) result.floats[kind] = part(floats[kind]);
  return result;
}

std::vector<std::pair<size_t, size_t>> MicrobatchRecord::Segment::Staying(size_t first, size_t last) const {
  // A shorter run takes less than the bookkeeping of a segment more.
  constexpr size_t kShortest = 64;
  const auto goes = [&](size_t i) {
    return i >= first && i < last && (states[i] == kPending || states[i] == kIgnored);
  };
  const size_t size = states.size();
  std::vector<std::pair<size_t, size_t>> staying;
  for (size_t begin = 0; begin < size;) {
    const bool going = goes(begin);
    size_t end = begin + 1;
    while (end < size && goes(end) == going) ++end;
    const bool at_an_edge = begin == 0 || end == size;
    if (!going || (!at_an_edge && end - begin < kShortest)) {
      if (!staying.empty() && staying.back().second == begin) {
        staying.back().second = end;
      } else {
        staying.emplace_back(begin, end);
      }
    }
    begin = end;
  }
  return staying;
}

template <typename Record, typename Fn>
void MicrobatchRecord::ForEachRun(Record& record, RowRange rows, Fn fn) {
  auto it = record.segments_.upper_bound(rows.begin);
  if (it != record.segments_.begin()) --it;
  for (; it != record.segments_.end() && it->first < rows.end; ++it) {
    const int64_t segment_end = it->first + static_cast<int64_t>(it->second.targets.size());
    const int64_t begin = std::max(rows.begin, it->first);
    const int64_t end = std::min(rows.end, segment_end);
    if (begin < end)
      fn(it->second, static_cast<size_t>(begin - it->first), static_cast<size_t>(end - begin), begin);
  }
}

void MicrobatchRecord::Insert(int64_t first_row, Segment segment) {
  declared_rows_ += segment.rows();
  settled_rows_ += segment.settled_rows();
  bytes_ += segment.bytes();
  segments_.emplace(first_row, std::move(segment));
}

MicrobatchRecord::Segment MicrobatchRecord::Remove(std::map<int64_t, Segment>::iterator it) {
  Segment segment = std::move(it->second);
  segments_.erase(it);
  declared_rows_ -= segment.rows();
  settled_rows_ -= segment.settled_rows();
  bytes_ -= segment.bytes();
  return segment;
}

// ---- Declared rows ----

std::array<absl::Span<const float>, MicrobatchRecord::kFloats> MicrobatchRecord::FloatsOf(
    const RowContents& contents) {
  return {contents.row_weights, contents.grad_loss, contents.grad_lse, contents.grad_entropy};
}

std::optional<int64_t> MicrobatchRecord::FirstDiffering(RowRange rows, const RowContents& contents) const {
  const auto floats = FloatsOf(contents);
  int64_t bad_row = -1;
  ForEachRun(*this, rows, [&](const Segment& segment, size_t first, size_t count, int64_t row) {
    const size_t offset = static_cast<size_t>(row - rows.begin);
    // Index in the run of the first row that differs, else count.
    const auto note = [&](auto differs) {
      size_t i = 0;
      while (i < count && !differs(i)) ++i;
      const int64_t differing = row + static_cast<int64_t>(i);
      if (i < count && (bad_row < 0 || differing < bad_row)) bad_row = differing;
    };
    if (!SameBytes(segment.targets.data() + first, contents.targets.data() + offset, count)) {
      note([&](size_t i) { return segment.targets[first + i] != contents.targets[offset + i]; });
    }
    for (size_t kind = 0; kind < kFloats; ++kind) {
      const std::vector<float>& kept = segment.floats[kind];
      const absl::Span<const float> given = floats[kind];
      if (kept.empty() && given.empty()) continue;
      if (!kept.empty() && !given.empty() && SameBytes(kept.data() + first, given.data() + offset, count))
        continue;
      note([&](size_t i) {
        return (kept.empty() ? kIfAbsent[kind] : kept[first + i]) !=
               (given.empty() ? kIfAbsent[kind] : given[offset + i]);
      });
    }
  });
  if (bad_row < 0) return std::nullopt;
  return bad_row;
}

std::vector<RowRange> MicrobatchRecord::Undeclared(RowRange rows) const {
  std::vector<RowRange> gaps;
  int64_t next = rows.begin;
  ForEachRun(*this, rows, [&](const Segment&, size_t, size_t count, int64_t row) {
    if (row > next) gaps.push_back({next, row});
    next = row + static_cast<int64_t>(count);
  });
  if (next < rows.end) gaps.push_back({next, rows.end});
  return gaps;
}

int64_t MicrobatchRecord::BytesToDeclare(RowRange piece, const RowContents& contents) {
  int64_t row_bytes = kRowBytes;
  for (const absl::Span<const float> values : FloatsOf(contents))
    row_bytes += values.empty() ? 0 : sizeof(float);
  return kSegmentBytes + piece.size() * row_bytes;
}

void MicrobatchRecord::Declare(RowRange piece, RowRange rows, const RowContents& contents) {
  const auto floats = FloatsOf(contents);
  const size_t offset = static_cast<size_t>(piece.begin - rows.begin);
  const size_t size = static_cast<size_t>(piece.size());
  const auto targets = contents.targets.subspan(offset, size);
  Segment segment;
  segment.targets.assign(targets.begin(), targets.end());
  for (size_t kind = 0; kind < kFloats; ++kind) {
    if (floats[kind].empty()) continue;
    const auto values = floats[kind].subspan(offset, size);
    segment.floats[kind].assign(values.begin(), values.end());
  }
  segment.states.resize(size, kPending);
  for (size_t i = 0; i < size; ++i) {
    if (segment.targets[i] == kernels::kIgnoredTarget) segment.states[i] = kIgnored;
  }
  Insert(piece.begin, std::move(segment));
}

void MicrobatchRecord::Keep(RowRange rows) {
  kept_ = true;
  ForEachRun(*this, rows, [](Segment& segment, size_t first, size_t count, int64_t) {
    const auto begin = segment.states.begin() + static_cast<std::ptrdiff_t>(first);
    std::replace(begin, begin + static_cast<std::ptrdiff_t>(count), uint8_t{kIgnored}, uint8_t{kSettled});
  });
}

void MicrobatchRecord::Withdraw(RowRange rows) {
  auto it = segments_.upper_bound(rows.begin);
  if (it != segments_.begin()) --it;
  while (it != segments_.end() && it->first < rows.end) {
    const int64_t begin = it->first;
    const int64_t size = it->second.rows();
    const auto first = static_cast<size_t>(std::clamp<int64_t>(rows.begin - begin, 0, size));
    const auto last = static_cast<size_t>(std::clamp<int64_t>(rows.end - begin, 0, size));
    const auto staying = it->second.Staying(first, last);
    const auto next = std::next(it);
    if (staying.size() != 1 || staying.front() != std::pair<size_t, size_t>(0, size)) {
      const Segment segment = Remove(it);
      for (const auto& [from, to] : staying) {
        Insert(begin + static_cast<int64_t>(from), segment.Part(from, to - from));
      }
    }
    it = next;
  }
}

RowValues MicrobatchRecord::Contents(RowRange rows) const {
  const auto size = static_cast<size_t>(rows.size());
  RowValues values{.targets = std::vector<int32_t>(size, kernels::kIgnoredTarget)};
  const std::array<std::vector<float>*, kFloats> floats = {&values.row_weights, &values.grad_loss,
                                                           &values.grad_lse, &values.grad_entropy};
  ForEachRun(*this, rows, [&](const Segment& segment, size_t first, size_t count, int64_t row) {
    const size_t offset = static_cast<size_t>(row - rows.begin);
    std::copy_n(segment.targets.data() + first, count, values.targets.data() + offset);
    for (size_t kind = 0; kind < kFloats; ++kind) {
      if (segment.floats[kind].empty()) continue;
      floats[kind]->resize(size, kIfAbsent[kind]);
      std::copy_n(segment.floats[kind].data() + first, count, floats[kind]->data() + offset);
    }
  });
  return values;
}

// ---- States ----

int64_t MicrobatchRecord::CountUnsettled(RowRange rows) const {
  int64_t unsettled = rows.size();
  ForEachRun(*this, rows, [&](const Segment& segment, size_t first, size_t count, int64_t) {
    const auto states = segment.states.begin() + static_cast<std::ptrdiff_t>(first);
    unsettled -= std::count_if(states, states + static_cast<std::ptrdiff_t>(count), IsSettled);
  });
  return unsettled;
}

void MicrobatchRecord::MarkUnsettled(RowRange rows, absl::Span<uint8_t> mask) const {
  std::fill(mask.begin(), mask.end(), uint8_t{1});
  ForEachRun(*this, rows, [&](const Segment& segment, size_t first, size_t count, int64_t row) {
    uint8_t* const out = mask.data() + (row - rows.begin);
    for (size_t i = 0; i < count; ++i) out[i] = IsSettled(segment.states[first + i]) ? 0 : 1;
  });
}

bool MicrobatchRecord::AnyReserved(RowRange rows) const {
  bool any = false;
  ForEachRun(*this, rows, [&](const Segment& segment, size_t first, size_t count, int64_t) {
    any = any || std::memchr(segment.states.data() + first, kReserved, count) != nullptr;
  });
  return any;
}

int64_t MicrobatchRecord::Reserve(RowRange rows, absl::Span<uint8_t> mask) {
  int64_t repeats = 0;
  ForEachRun(*this, rows, [&](Segment& segment, size_t first, size_t count, int64_t row) {
    uint8_t* const states = segment.states.data() + first;
    const int32_t* const targets = segment.targets.data() + first;
    uint8_t* const out = mask.data() + (row - rows.begin);
    for (size_t i = 0; i < count; ++i) {
      const bool pending = states[i] == kPending;
      repeats += !pending && targets[i] != kernels::kIgnoredTarget ? 1 : 0;
      out[i] = pending ? 1 : 0;
      states[i] = pending ? static_cast<uint8_t>(kReserved) : states[i];
    }
  });
  return repeats;
}

int64_t MicrobatchRecord::ReplaceReserved(RowRange rows, RowState state) {
  int64_t replaced = 0;
  ForEachRun(*this, rows, [&](Segment& segment, size_t first, size_t count, int64_t) {
    uint8_t* const states = segment.states.data() + first;
    for (size_t i = 0; i < count; ++i) {
      const bool reserved = states[i] == kReserved;
      replaced += reserved ? 1 : 0;
      states[i] = reserved ? static_cast<uint8_t>(state) : states[i];
    }
  });
  return replaced;
}

int64_t MicrobatchRecord::Commit(RowRange rows) {
  const int64_t committed = ReplaceReserved(rows, kSettled);
  settled_rows_ += committed;
  accumulated_rows_ += committed;
  return committed;
}

std::string MicrobatchRecord::DescribeMissing() const {
  constexpr int kMaxRanges = 8;
  std::vector<RowRange> missing;
  int64_t next = 0;  // first row not yet known to be settled
  const auto note = [&missing](int64_t begin, int64_t end) {
    if (begin >= end) return;
    if (!missing.empty() && missing.back().end == begin) {
      missing.back().end = end;
    } else {
      missing.push_back({begin, end});
    }
  };
  for (const auto& [begin, segment] : segments_) {
    note(next, begin);
    for (size_t i = 0; i < segment.states.size(); ++i) {
      const int64_t row = begin + static_cast<int64_t>(i);
      if (!IsSettled(segment.states[i])) note(row, row + 1);
    }
    next = begin + static_cast<int64_t>(segment.states.size());
  }
  note(next, terms_.microbatch_rows);
  std::string text = "rows ";
  for (size_t i = 0; i < missing.size() && i < kMaxRanges; ++i) {
    absl::StrAppend(&text, i == 0 ? "" : ", ", Text(missing[i]));
  }
  if (missing.size() > kMaxRanges)
    absl::StrAppend(&text, " and ", missing.size() - kMaxRanges, " more ranges");
  return absl::StrCat(text, " of ", terms_.microbatch_rows);
}

}  // namespace lossd::engine
