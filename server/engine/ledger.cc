#include "server/engine/ledger.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/backend.h"
#include "kernels/errors/field_error.h"
#include "server/engine/errors.h"

namespace lossd::engine {
namespace {

// Finds nothing, and fast, in the usual case.
template <typename T>
bool SameBytes(const T* a, const T* b, size_t count) {
  return std::memcmp(a, b, count * sizeof(T)) == 0;
}

// "open.microbatch_id <id><how>"
absl::Status OpenedOtherwise(uint64_t id, absl::string_view how) {
  return errors::WithViolation(
      absl::FailedPreconditionError(absl::StrCat("open.microbatch_id ", id, how)),
      {"open.microbatch_id", "must be opened again as it was opened before", absl::StrCat(id)});
}

}  // namespace

template <typename MicrobatchT, typename Fn>
void Ledger::ForEachRun(MicrobatchT& microbatch, RowRange rows, Fn fn) {
  auto it = microbatch.segments.upper_bound(rows.begin);
  if (it != microbatch.segments.begin()) --it;
  for (; it != microbatch.segments.end() && it->first < rows.end; ++it) {
    const int64_t segment_end = it->first + static_cast<int64_t>(it->second.targets.size());
    const int64_t begin = std::max(rows.begin, it->first);
    const int64_t end = std::min(rows.end, segment_end);
    if (begin < end)
      fn(it->second, static_cast<size_t>(begin - it->first), static_cast<size_t>(end - begin), begin);
  }
}

std::array<absl::Span<const float>, Ledger::kFloats> Ledger::FloatsOf(const RowContents& contents) {
  return {contents.row_weights, contents.grad_loss, contents.grad_lse, contents.grad_entropy};
}

absl::Status Ledger::CheckAgreement(uint64_t id, const Microbatch& known, RowRange rows,
                                    const RowContents& contents) {
  const auto floats = FloatsOf(contents);
  int64_t bad_row = -1;
  ForEachRun(known, rows, [&](const Segment& segment, size_t first, size_t count, int64_t row) {
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
  if (bad_row < 0) return absl::OkStatus();
  return OpenedOtherwise(
      id,
      absl::StrCat(": row ", bad_row, " was opened before with another target, weight or upstream gradient"));
}

std::vector<RowRange> Ledger::Undeclared(const Microbatch& microbatch, RowRange rows) {
  std::vector<RowRange> gaps;
  int64_t next = rows.begin;
  ForEachRun(microbatch, rows, [&](const Segment&, size_t, size_t count, int64_t row) {
    if (row > next) gaps.push_back({next, row});
    next = row + static_cast<int64_t>(count);
  });
  if (next < rows.end) gaps.push_back({next, rows.end});
  return gaps;
}

// ---- Segments ----

int64_t Ledger::Segment::bytes() const {
  int64_t row_bytes = sizeof(int32_t) + sizeof(uint8_t);
  for (const std::vector<float>& values : floats) row_bytes += values.empty() ? 0 : sizeof(float);
  return kSegmentBytes + rows() * row_bytes;
}

Ledger::Segment Ledger::Segment::Part(size_t first, size_t count) const {
  const auto part = [first, count](const auto& values) {
    const auto begin = values.begin() + static_cast<std::ptrdiff_t>(values.empty() ? 0 : first);
    const auto size = static_cast<std::ptrdiff_t>(values.empty() ? 0 : count);
    return std::remove_cvref_t<decltype(values)>(begin, begin + size);
  };
  Segment result{.targets = part(targets), .states = part(states)};
  for (size_t kind = 0; kind < kFloats; ++kind) result.floats[kind] = part(floats[kind]);
  return result;
}

Ledger::Segment Ledger::MakeSegment(RowRange piece, RowRange rows, const RowContents& contents) {
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
  return segment;
}

void Ledger::Insert(Microbatch& microbatch, int64_t first_row, Segment segment) {
  declared_rows_ += segment.rows();
  microbatch.settled_rows += std::count_if(segment.states.begin(), segment.states.end(), IsSettled);
  microbatch.segments.emplace(first_row, std::move(segment));
}

Ledger::Segment Ledger::Remove(Microbatch& microbatch, std::map<int64_t, Segment>::iterator it) {
  Segment segment = std::move(it->second);
  microbatch.segments.erase(it);
  declared_rows_ -= segment.rows();
  microbatch.settled_rows -= std::count_if(segment.states.begin(), segment.states.end(), IsSettled);
  return segment;
}

template <typename Change>
void Ledger::Update(Microbatch& microbatch, Change change) {
  const bool was_begun = microbatch.begun();
  const bool was_half_done = microbatch.half_done();
  change();
  begun_ += int64_t{microbatch.begun()} - int64_t{was_begun};
  half_done_ += int64_t{microbatch.half_done()} - int64_t{was_half_done};
}

absl::Status Ledger::CheckLimits(uint64_t id, bool is_new, int64_t rows) const {
  if (declared_rows_ + rows > max_rows_) {
    return absl::ResourceExhaustedError(absl::StrCat("the step's ledger holds ", declared_rows_, " rows; ",
                                                     rows, " more would exceed its limit of ", max_rows_,
                                                     " (apply the step or zero its gradients)"));
  }
  if (is_new && microbatches() >= max_microbatches_) {
    return FieldError(absl::StatusCode::kResourceExhausted, "open.microbatch_id",
                      absl::StrCat("must be one of the ", max_microbatches_,
                                   " that the step has, as many as it may (apply it or zero its gradients)"),
                      absl::StrCat(id));
  }
  return absl::OkStatus();
}

absl::Status Ledger::Declare(uint64_t id, const MicrobatchTerms& terms, RowRange rows,
                             const RowContents& contents) {
  auto it = microbatches_.find(id);
  const bool is_new = it == microbatches_.end();
  if (!is_new) {
    if (!(it->second.terms == terms)) {
      return OpenedOtherwise(
          id,
          " was opened before with other options (rows, loss options, dtype, reduction, normalizer or "
          "grad_output; in deterministic mode also want_grad_hidden or want_row_entropy)");
    }
    if (auto status = CheckAgreement(id, it->second, rows, contents); !status.ok()) return status;
  }
  const std::vector<RowRange> pieces = is_new ? std::vector<RowRange>{rows} : Undeclared(it->second, rows);
  int64_t added = 0;
  for (RowRange piece : pieces) added += piece.size();
  if (auto status = CheckLimits(id, is_new, added); !status.ok()) return status;
  std::vector<std::pair<int64_t, Segment>> segments;
  int64_t bytes = is_new ? kMicrobatchBytes : 0;
  for (RowRange piece : pieces) {
    if (piece.size() == 0) continue;
    segments.emplace_back(piece.begin, MakeSegment(piece, rows, contents));
    bytes += segments.back().second.bytes();
  }
  if (auto status = memory_.Take(bytes); !status.ok()) return status;
  bytes_ += bytes;
  if (is_new) {
    it = microbatches_.emplace(id, Microbatch{.terms = terms}).first;
    begun_ += it->second.begun() ? 1 : 0;  // it has no rows
  }
  Update(it->second, [&] {
    for (auto& [first_row, segment] : segments) Insert(it->second, first_row, std::move(segment));
  });
  return absl::OkStatus();
}

void Ledger::Keep(uint64_t id, RowRange rows) {
  const auto it = microbatches_.find(id);
  if (it == microbatches_.end()) return;
  it->second.kept = true;
  ForEachRun(it->second, rows, [](Segment& segment, size_t first, size_t count, int64_t) {
    const auto begin = segment.states.begin() + static_cast<std::ptrdiff_t>(first);
    std::replace(begin, begin + static_cast<std::ptrdiff_t>(count), uint8_t{kIgnored}, uint8_t{kSettled});
  });
}

std::vector<std::pair<size_t, size_t>> Ledger::Staying(const Segment& segment, size_t first, size_t last) {
  // A shorter run takes less than the bookkeeping of a segment more.
  constexpr size_t kShortest = 64;
  const auto goes = [&](size_t i) {
    return i >= first && i < last && (segment.states[i] == kPending || segment.states[i] == kIgnored);
  };
  const size_t size = segment.states.size();
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

void Ledger::Withdraw(uint64_t id, RowRange rows, bool forget_empty) {
  const auto entry = microbatches_.find(id);
  if (entry == microbatches_.end()) return;
  Microbatch& microbatch = entry->second;
  const int64_t bytes_before = bytes_;
  Update(microbatch, [&] {
    auto it = microbatch.segments.upper_bound(rows.begin);
    if (it != microbatch.segments.begin()) --it;
    while (it != microbatch.segments.end() && it->first < rows.end) {
      const int64_t begin = it->first;
      const int64_t size = it->second.rows();
      const auto first = static_cast<size_t>(std::clamp<int64_t>(rows.begin - begin, 0, size));
      const auto last = static_cast<size_t>(std::clamp<int64_t>(rows.end - begin, 0, size));
      const auto staying = Staying(it->second, first, last);
      const auto next = std::next(it);
      if (staying.size() != 1 || staying.front() != std::pair<size_t, size_t>(0, size)) {
        const Segment segment = Remove(microbatch, it);
        bytes_ -= segment.bytes();
        for (const auto& [from, to] : staying) {
          Segment part = segment.Part(from, to - from);
          bytes_ += part.bytes();
          Insert(microbatch, begin + static_cast<int64_t>(from), std::move(part));
        }
      }
      it = next;
    }
  });
  if (forget_empty && microbatch.segments.empty() && !microbatch.kept) {
    begun_ -= microbatch.begun() ? 1 : 0;
    microbatches_.erase(entry);
    bytes_ -= kMicrobatchBytes;
  }
  memory_.Give(bytes_before - bytes_);
}

std::optional<int64_t> Ledger::MicrobatchRows(uint64_t id) const {
  const auto it = microbatches_.find(id);
  if (it == microbatches_.end()) return std::nullopt;
  return it->second.terms.microbatch_rows;
}

int64_t Ledger::CountUnsettled(uint64_t id, RowRange rows) const {
  int64_t unsettled = rows.size();
  const auto it = microbatches_.find(id);
  if (it == microbatches_.end()) return unsettled;
  ForEachRun(it->second, rows, [&](const Segment& segment, size_t first, size_t count, int64_t) {
    const auto states = segment.states.begin() + static_cast<std::ptrdiff_t>(first);
    unsettled -= std::count_if(states, states + static_cast<std::ptrdiff_t>(count), IsSettled);
  });
  return unsettled;
}

void Ledger::MarkUnsettled(uint64_t id, RowRange rows, absl::Span<uint8_t> mask) const {
  std::fill(mask.begin(), mask.end(), uint8_t{1});
  const auto it = microbatches_.find(id);
  if (it == microbatches_.end()) return;
  ForEachRun(it->second, rows, [&](const Segment& segment, size_t first, size_t count, int64_t row) {
    uint8_t* const out = mask.data() + (row - rows.begin);
    for (size_t i = 0; i < count; ++i) out[i] = IsSettled(segment.states[first + i]) ? 0 : 1;
  });
}

RowValues Ledger::Contents(uint64_t id, RowRange rows) const {
  const auto size = static_cast<size_t>(rows.size());
  RowValues values{.targets = std::vector<int32_t>(size, kernels::kIgnoredTarget)};
  const std::array<std::vector<float>*, kFloats> floats = {&values.row_weights, &values.grad_loss,
                                                           &values.grad_lse, &values.grad_entropy};
  ForEachRun(microbatches_.at(id), rows,
             [&](const Segment& segment, size_t first, size_t count, int64_t row) {
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

bool Ledger::AnyReserved(uint64_t id, RowRange rows) const {
  bool any = false;
  ForEachRun(microbatches_.at(id), rows, [&](const Segment& segment, size_t first, size_t count, int64_t) {
    any = any || std::memchr(segment.states.data() + first, kReserved, count) != nullptr;
  });
  return any;
}

int64_t Ledger::Reserve(uint64_t id, RowRange rows, absl::Span<uint8_t> mask) {
  int64_t repeats = 0;
  ForEachRun(microbatches_.at(id), rows, [&](Segment& segment, size_t first, size_t count, int64_t row) {
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

int64_t Ledger::ReplaceReserved(Microbatch& microbatch, RowRange rows, RowState state) {
  int64_t replaced = 0;
  ForEachRun(microbatch, rows, [&](Segment& segment, size_t first, size_t count, int64_t) {
    uint8_t* const states = segment.states.data() + first;
    for (size_t i = 0; i < count; ++i) {
      const bool reserved = states[i] == kReserved;
      replaced += reserved ? 1 : 0;
      states[i] = reserved ? static_cast<uint8_t>(state) : states[i];
    }
  });
  return replaced;
}

int64_t Ledger::Commit(uint64_t id, RowRange rows) {
  Microbatch& microbatch = microbatches_.at(id);
  int64_t committed = 0;
  Update(microbatch, [&] {
    committed = ReplaceReserved(microbatch, rows, kSettled);
    microbatch.settled_rows += committed;
    microbatch.accumulated_rows += committed;
  });
  accumulated_rows_ += committed;
  return committed;
}

void Ledger::Release(uint64_t id, RowRange rows) { ReplaceReserved(microbatches_.at(id), rows, kPending); }

void Ledger::Clear() {
  microbatches_.clear();
  memory_.Give(bytes_);
  begun_ = 0;
  half_done_ = 0;
  accumulated_rows_ = 0;
  declared_rows_ = 0;
  bytes_ = 0;
}

}  // namespace lossd::engine
