#include "server/engine/ledger.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/backend.h"
#include "server/engine/errors.h"

namespace lossd::engine {
template <typename MicrobatchT, typename Fn>
void Ledger::ForEachRow(MicrobatchT& microbatch, RowRange rows, Fn fn) {
  auto it = microbatch.segments.upper_bound(rows.begin);
  if (it != microbatch.segments.begin()) --it;
  for (; it != microbatch.segments.end() && it->first < rows.end; ++it) {
    const int64_t segment_end = it->first + static_cast<int64_t>(it->second.targets.size());
    const int64_t begin = std::max(rows.begin, it->first);
    const int64_t end = std::min(rows.end, segment_end);
    for (int64_t row = begin; row < end; ++row) fn(it->second, static_cast<size_t>(row - it->first), row);
  }
}

absl::Status Ledger::CheckAgreement(uint64_t id, const Microbatch& known, RowRange rows,
                                    absl::Span<const int32_t> targets, absl::Span<const float> row_weights) {
  int64_t bad_row = -1;
  ForEachRow(known, rows, [&](const Segment& segment, size_t i, int64_t row) {
    const size_t j = static_cast<size_t>(row - rows.begin);
    const float weight = row_weights.empty() ? 1.0f : row_weights[j];
    if (bad_row < 0 && (segment.targets[i] != targets[j] || segment.weight(i) != weight)) bad_row = row;
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
          " was opened before with other options (rows, loss options, dtype, reduction, normalizer "
          "or grad_output)"));
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

bool Ledger::AnyReserved(uint64_t id, RowRange rows) const {
  bool any = false;
  ForEachRow(microbatches_.at(id), rows,
             [&](const Segment& segment, size_t i, int64_t) { any = any || segment.states[i] == kReserved; });
  return any;
}

int64_t Ledger::Reserve(uint64_t id, RowRange rows, absl::Span<uint8_t> mask) {
  int64_t repeats = 0;
  ForEachRow(microbatches_.at(id), rows, [&](Segment& segment, size_t i, int64_t row) {
    const bool valid = segment.targets[i] != kernels::kIgnoredTarget;
    const bool pending = segment.states[i] == kPending;
    mask[static_cast<size_t>(row - rows.begin)] = pending ? 1 : 0;
    if (pending) segment.states[i] = kReserved;
    if (valid && !pending) ++repeats;
  });
  return repeats;
}

int64_t Ledger::Commit(uint64_t id, RowRange rows) {
  Microbatch& microbatch = microbatches_.at(id);
  int64_t committed = 0;
  ForEachRow(microbatch, rows, [&](Segment& segment, size_t i, int64_t) {
    if (segment.states[i] != kReserved) return;
    segment.states[i] = kSettled;
    ++committed;
  });
  microbatch.settled_rows += committed;
  accumulated_rows_ += committed;
  return committed;
}

void Ledger::Release(uint64_t id, RowRange rows) {
  ForEachRow(microbatches_.at(id), rows, [](Segment& segment, size_t i, int64_t) {
    if (segment.states[i] == kReserved) segment.states[i] = kPending;
  });
}

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

void Ledger::Clear() {
  microbatches_.clear();
  accumulated_rows_ = 0;
  declared_rows_ = 0;
  bytes_ = 0;
}

}  // namespace lossd::engine
