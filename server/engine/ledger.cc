#include "server/engine/ledger.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <set>
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
  for (const auto& [begin, segment] : microbatch.segments) {
    const int64_t end = begin + static_cast<int64_t>(segment.targets.size());
    if (begin >= rows.end) break;
    if (end <= next) continue;
    if (begin > next) gaps.push_back({next, begin});
    next = end;
  }
  if (next < rows.end) gaps.push_back({next, rows.end});
  return gaps;
}

void Ledger::AddSegment(Microbatch& microbatch, RowRange piece, RowRange rows, const RowContents& contents) {
  const auto floats = FloatsOf(contents);
  const size_t offset = static_cast<size_t>(piece.begin - rows.begin);
  const size_t size = static_cast<size_t>(piece.size());
  const auto targets = contents.targets.subspan(offset, size);
  Segment segment;
  segment.targets.assign(targets.begin(), targets.end());
  int64_t row_bytes = sizeof(int32_t) + sizeof(uint8_t);
  for (size_t kind = 0; kind < kFloats; ++kind) {
    if (floats[kind].empty()) continue;
    const auto values = floats[kind].subspan(offset, size);
    segment.floats[kind].assign(values.begin(), values.end());
    row_bytes += sizeof(float);
  }
  segment.states.resize(size, kPending);
  for (size_t i = 0; i < size; ++i) {
    if (segment.targets[i] != kernels::kIgnoredTarget) continue;
    segment.states[i] = kSettled;
    ++microbatch.settled_rows;
  }
  declared_rows_ += piece.size();
  bytes_ += piece.size() * row_bytes;
  microbatch.segments.emplace(piece.begin, std::move(segment));
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
  if (is_new) it = microbatches_.emplace(id, Microbatch{.terms = terms}).first;
  for (RowRange piece : pieces) {
    if (piece.size() > 0) AddSegment(it->second, piece, rows, contents);
  }
  return absl::OkStatus();
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
    unsettled -= std::count(states, states + static_cast<std::ptrdiff_t>(count), kSettled);
  });
  return unsettled;
}

void Ledger::MarkUnsettled(uint64_t id, RowRange rows, absl::Span<uint8_t> mask) const {
  std::fill(mask.begin(), mask.end(), uint8_t{1});
  const auto it = microbatches_.find(id);
  if (it == microbatches_.end()) return;
  ForEachRun(it->second, rows, [&](const Segment& segment, size_t first, size_t count, int64_t row) {
    uint8_t* const out = mask.data() + (row - rows.begin);
    for (size_t i = 0; i < count; ++i) out[i] = segment.states[first + i] != kSettled ? 1 : 0;
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
  const int64_t committed = ReplaceReserved(microbatch, rows, kSettled);
  microbatch.settled_rows += committed;
  microbatch.accumulated_rows += committed;
  accumulated_rows_ += committed;
  return committed;
}

void Ledger::Release(uint64_t id, RowRange rows) { ReplaceReserved(microbatches_.at(id), rows, kPending); }

std::string Ledger::DescribeMissing(uint64_t id, const Microbatch& microbatch) {
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
  for (const auto& [begin, segment] : microbatch.segments) {
    note(next, begin);
    for (size_t i = 0; i < segment.states.size(); ++i) {
      const int64_t row = begin + static_cast<int64_t>(i);
      if (segment.states[i] != kSettled) note(row, row + 1);
    }
    next = begin + static_cast<int64_t>(segment.states.size());
  }
  note(next, microbatch.terms.microbatch_rows);
  std::string text = absl::StrCat("microbatch ", id, ": rows ");
  for (size_t i = 0; i < missing.size() && i < kMaxRanges; ++i) {
    absl::StrAppend(&text, i == 0 ? "" : ", ", Text(missing[i]));
  }
  if (missing.size() > kMaxRanges)
    absl::StrAppend(&text, " and ", missing.size() - kMaxRanges, " more ranges");
  return absl::StrCat(text, " of ", microbatch.terms.microbatch_rows);
}

std::vector<std::string> Ledger::Missing(absl::Span<const uint64_t> ids, int max_lines) const {
  std::vector<std::string> lines;
  int64_t more = 0;
  for (uint64_t id : ids) {
    const auto it = microbatches_.find(id);
    if (it != microbatches_.end() && it->second.complete()) continue;
    if (static_cast<int>(lines.size()) >= max_lines) {
      ++more;
    } else {
      lines.push_back(it == microbatches_.end() ? absl::StrCat("microbatch ", id, ": never opened")
                                                : DescribeMissing(id, it->second));
    }
  }
  if (more > 0) lines.push_back(absl::StrCat("and ", more, " more microbatches"));
  return lines;
}

std::vector<std::string> Ledger::Incomplete(absl::Span<const uint64_t> ids, int max_lines) const {
  const std::set<uint64_t> expected(ids.begin(), ids.end());
  std::vector<std::string> lines;
  for (const auto& [id, microbatch] : microbatches_) {
    if (static_cast<int>(lines.size()) >= max_lines) break;
    if (microbatch.complete() || expected.contains(id) || microbatch.accumulated_rows == 0) continue;
    lines.push_back(absl::StrCat(DescribeMissing(id, microbatch), " (not expected, but begun)"));
  }
  return lines;
}

std::vector<uint64_t> Ledger::CompleteIds() const {
  std::vector<uint64_t> ids;
  for (const auto& [id, microbatch] : microbatches_) {
    if (microbatch.complete()) ids.push_back(id);
  }
  return ids;
}

int64_t Ledger::begun_microbatches() const {
  return std::count_if(microbatches_.begin(), microbatches_.end(), [](const auto& entry) {
    return entry.second.accumulated_rows > 0 || entry.second.complete();
  });
}

void Ledger::Clear() {
  microbatches_.clear();
  accumulated_rows_ = 0;
  declared_rows_ = 0;
  bytes_ = 0;
}

}  // namespace lossd::engine
