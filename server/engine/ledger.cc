#include "server/engine/ledger.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/backend.h"
#include "server/engine/errors.h"

namespace lossd::engine {
namespace {

// Finds nothing, and fast, in the usual case.
template <typename T>
bool SameBytes(const T* a, const T* b, size_t count) {
  return std::memcmp(a, b, count * sizeof(T)) == 0;
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

absl::Status Ledger::CheckAgreement(uint64_t id, const Microbatch& known, RowRange rows,
                                    absl::Span<const int32_t> targets, absl::Span<const float> row_weights) {
  int64_t bad_row = -1;
  ForEachRun(known, rows, [&](const Segment& segment, size_t first, size_t count, int64_t row) {
    const size_t offset = static_cast<size_t>(row - rows.begin);
    const bool unweighted = segment.row_weights.empty() && row_weights.empty();
    const bool same_weights =
        unweighted || (!segment.row_weights.empty() && !row_weights.empty() &&
                       SameBytes(segment.row_weights.data() + first, row_weights.data() + offset, count));
    if (same_weights && SameBytes(segment.targets.data() + first, targets.data() + offset, count)) return;
    for (size_t i = 0; i < count && bad_row < 0; ++i) {
      const float weight = row_weights.empty() ? 1.0f : row_weights[offset + i];
      if (segment.targets[first + i] != targets[offset + i] || segment.weight(first + i) != weight)
        bad_row = row + static_cast<int64_t>(i);
    }
  });
  if (bad_row < 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("open.microbatch_id ", id, ": row ", bad_row,
                                                    " was opened before with another target or weight"));
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

void Ledger::AddSegment(Microbatch& microbatch, RowRange piece, RowRange rows,
                        absl::Span<const int32_t> targets, absl::Span<const float> row_weights) {
  const size_t offset = static_cast<size_t>(piece.begin - rows.begin);
  const size_t size = static_cast<size_t>(piece.size());
  const auto piece_targets = targets.subspan(offset, size);
  Segment segment;
  segment.targets.assign(piece_targets.begin(), piece_targets.end());
  if (!row_weights.empty()) {
    const auto piece_weights = row_weights.subspan(offset, size);
    segment.row_weights.assign(piece_weights.begin(), piece_weights.end());
  }
  segment.states.resize(size, kPending);
  for (size_t i = 0; i < size; ++i) {
    if (segment.targets[i] != kernels::kIgnoredTarget) continue;
    segment.states[i] = kSettled;
    ++microbatch.settled_rows;
  }
  declared_rows_ += piece.size();
  bytes_ += piece.size() * (row_weights.empty() ? 5 : 9);
  microbatch.segments.emplace(piece.begin, std::move(segment));
}

absl::Status Ledger::Declare(uint64_t id, const MicrobatchTerms& terms, RowRange rows,
                             absl::Span<const int32_t> targets, absl::Span<const float> row_weights) {
  auto it = microbatches_.find(id);
  if (it != microbatches_.end()) {
    if (!(it->second.terms == terms)) {
      return absl::FailedPreconditionError(absl::StrCat(
          "open.microbatch_id ", id,
          " was opened before with other options (rows, loss options, dtype, reduction, normalizer or "
          "grad_output; in deterministic mode also want_grad_hidden or want_row_entropy)"));
    }
    if (auto status = CheckAgreement(id, it->second, rows, targets, row_weights); !status.ok()) return status;
  }
  const std::vector<RowRange> pieces =
      it == microbatches_.end() ? std::vector<RowRange>{rows} : Undeclared(it->second, rows);
  int64_t added = 0;
  for (RowRange piece : pieces) added += piece.size();
  if (declared_rows_ + added > max_rows_) {
    return absl::ResourceExhaustedError(absl::StrCat("the step's ledger holds ", declared_rows_, " rows; ",
                                                     added, " more would exceed its limit of ", max_rows_,
                                                     " (apply the step or zero its gradients)"));
  }
  if (it == microbatches_.end()) it = microbatches_.emplace(id, Microbatch{.terms = terms}).first;
  for (RowRange piece : pieces) {
    if (piece.size() > 0) AddSegment(it->second, piece, rows, targets, row_weights);
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

void Ledger::CopyContents(uint64_t id, RowRange rows, absl::Span<int32_t> targets,
                          absl::Span<float> row_weights) const {
  ForEachRun(microbatches_.at(id), rows,
             [&](const Segment& segment, size_t first, size_t count, int64_t row) {
               const size_t offset = static_cast<size_t>(row - rows.begin);
               std::copy_n(segment.targets.data() + first, count, targets.data() + offset);
               if (segment.row_weights.empty()) {
                 std::fill_n(row_weights.data() + offset, count, 1.0f);
               } else {
                 std::copy_n(segment.row_weights.data() + first, count, row_weights.data() + offset);
               }
             });
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
    const bool complete =
        it != microbatches_.end() && it->second.settled_rows == it->second.terms.microbatch_rows;
    if (complete) continue;
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

bool Ledger::AnyAccumulated(const Microbatch& microbatch) {
  for (const auto& [begin, segment] : microbatch.segments) {
    for (size_t i = 0; i < segment.states.size(); ++i) {
      if (segment.states[i] == kSettled && segment.targets[i] != kernels::kIgnoredTarget) return true;
    }
  }
  return false;
}

std::vector<std::string> Ledger::Halves(absl::Span<const uint64_t> ids, int max_lines) const {
  const std::set<uint64_t> expected(ids.begin(), ids.end());
  std::vector<std::string> lines;
  for (const auto& [id, microbatch] : microbatches_) {
    if (static_cast<int>(lines.size()) >= max_lines) break;
    const bool complete = microbatch.settled_rows == microbatch.terms.microbatch_rows;
    if (complete || expected.contains(id) || !AnyAccumulated(microbatch)) continue;
    lines.push_back(absl::StrCat(DescribeMissing(id, microbatch), " (not expected, but begun)"));
  }
  return lines;
}

std::vector<uint64_t> Ledger::Ids() const {
  std::vector<uint64_t> ids;
  for (const auto& [id, microbatch] : microbatches_) ids.push_back(id);
  return ids;
}

void Ledger::Clear() {
  microbatches_.clear();
  accumulated_rows_ = 0;
  declared_rows_ = 0;
  bytes_ = 0;
}

}  // namespace lossd::engine
