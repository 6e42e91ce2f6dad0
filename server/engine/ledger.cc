// SPDX-License-Identifier: Apache-2.0
// The ledgers of an open step (ledger.h), and the checks of a contribution's values.
//
// The rows of a microbatch lie in segments: runs of rows that were declared together, by first row. Each row
// has a state:
// - kPending: declared, not accumulated. Reserve makes it kReserved, when its chunk is formed.
// - kReserved: in a chunk under way. Commit makes it kSettled when its gradient has been added; Release makes
//   it kPending again.
// - kSettled: counts in the step, and stays until Clear.
// - kIgnored: has no target, so it counts as settled from the beginning. Keep makes it kSettled; until then
//   Withdraw forgets it, as it does pending rows.
#include "server/engine/ledger.h"

#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/backend.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"
#include "server/engine/errors.h"

namespace lossd::engine {
namespace {

constexpr int64_t kTargetAndStateBytes = sizeof(int32_t) + sizeof(uint8_t);  // per row of a microbatch

// A fast test for the usual case, in which rows come again with the same contents. False does not mean that
// the values differ (0 and -0).
template <typename T>
bool SameBytes(const T* a, const T* b, size_t count) {
  return std::memcmp(a, b, count * sizeof(T)) == 0;
}

// Collects the ranges of missing rows, for a message.
class MissingRows {
 public:
  // Adds rows that lie behind all rows added before. The range may be empty.
  void Add(RowRange rows) {
    if (rows.begin >= rows.end) return;
    if (!ranges_.empty() && ranges_.back().end == rows.begin) {
      ranges_.back().end = rows.end;
    } else {
      ranges_.push_back(rows);
    }
  }
  // E.g. "rows [0, 4), [8, 16)"; after eight ranges the text ends with e.g. "and 3 more ranges".
  std::string ToText() const {
    constexpr size_t kMost = 8;
    std::string text = "rows ";
    for (size_t i = 0; i < ranges_.size() && i < kMost; ++i) {
      absl::StrAppend(&text, i == 0 ? "" : ", ", Text(ranges_[i]));
    }
    if (ranges_.size() > kMost) absl::StrAppend(&text, " and ", ranges_.size() - kMost, " more ranges");
    return text;
  }

 private:
  std::vector<RowRange> ranges_;
};

}  // namespace

// ---- MicrobatchRecord: segments ----

int64_t MicrobatchRecord::Segment::settled_rows() const {
  return std::count_if(states.begin(), states.end(), IsSettled);
}

int64_t MicrobatchRecord::Segment::bytes() const {
  int64_t row_bytes = kTargetAndStateBytes;
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
  // A shorter run between rows that stay also stays: it takes less memory than one more segment would.
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

// ---- MicrobatchRecord: declared rows ----

SoftDigest DigestOf(const SoftTargets& soft, absl::Span<const int32_t> targets) {
  SoftDigest digest;
  if (soft.count == 0) return digest;
  const auto each = static_cast<size_t>(soft.count);
  for (size_t row = 0; row < targets.size(); ++row) {
    const int32_t* const classes = soft.classes.data() + row * each;
    const float* const weights = soft.weights.data() + row * each;
    uint64_t hash = XXH3_64bits(classes, each * sizeof(int32_t));
    hash = XXH3_64bits_withSeed(weights, each * sizeof(float), hash);
    double sum = 0.0;
    for (size_t i = 0; i < each && targets[row] != kernels::kIgnoredTarget; ++i) sum += double{weights[i]};
    // The ledger keeps floats, so 48 bits of the hash become two whole numbers. kWhole is the largest 24-bit
    // number, which a float represents exactly.
    constexpr uint64_t kWhole = (uint64_t{1} << 24) - 1;
    digest.low.push_back(static_cast<float>(hash & kWhole));
    digest.high.push_back(static_cast<float>(hash >> 24 & kWhole));
    digest.sums.push_back(static_cast<float>(sum));
  }
  return digest;
}

std::array<absl::Span<const float>, MicrobatchRecord::kFloats> MicrobatchRecord::FloatsOf(
    const RowContents& contents) {
  return {contents.row_weights, contents.grad_loss,    contents.grad_lse,     contents.grad_entropy,
          contents.advantages,  contents.old_logprobs, contents.ref_logprobs, contents.soft_low,
          contents.soft_high,   contents.soft_sums};
}

std::optional<int64_t> MicrobatchRecord::FirstDiffering(RowRange rows, const RowContents& contents) const {
  const auto floats = FloatsOf(contents);
  int64_t bad_row = -1;
  ForEachRun(*this, rows, [&](const Segment& segment, size_t first, size_t count, int64_t row) {
    const size_t offset = static_cast<size_t>(row - rows.begin);
    // Updates bad_row with the first row of the run that differs, if one does.
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
  int64_t row_bytes = kTargetAndStateBytes;
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
  const std::array<std::vector<float>*, kFloats> floats = {
      &values.row_weights,          &values.grad_loss,          &values.grad_lse,
      &values.grad_entropy,         &values.numbers.advantages, &values.numbers.old_logprobs,
      &values.numbers.ref_logprobs, &values.digest.low,         &values.digest.high,
      &values.digest.sums};
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

// ---- MicrobatchRecord: states of rows ----

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
  MissingRows missing;
  int64_t next = 0;  // the first row that the loop has not looked at
  for (const auto& [begin, segment] : segments_) {
    missing.Add({next, begin});
    for (size_t i = 0; i < segment.states.size(); ++i) {
      const int64_t row = begin + static_cast<int64_t>(i);
      if (!IsSettled(segment.states[i])) missing.Add({row, row + 1});
    }
    next = begin + static_cast<int64_t>(segment.states.size());
  }
  missing.Add({next, terms_.microbatch_rows});
  return absl::StrCat(missing.ToText(), " of ", terms_.microbatch_rows);
}

// ---- Ledger: texts ----

namespace {

// An error with the text "open.microbatch_id <id><how>".
absl::Status OpenedOtherwise(uint64_t id, absl::string_view how) {
  return errors::WithViolation(
      absl::FailedPreconditionError(absl::StrCat("open.microbatch_id ", id, how)),
      {"open.microbatch_id", "must be opened again as it was opened before", absl::StrCat(id)});
}

std::string Describe(uint64_t id, const MicrobatchRecord& record) {
  return absl::StrCat("microbatch ", id, ": ", record.DescribeMissing());
}

}  // namespace

// ---- Ledger: declared rows ----

void Ledger::Count(const MicrobatchRecord& record) {
  begun_ += record.begun() ? 1 : 0;
  half_done_ += record.half_done() ? 1 : 0;
  accumulated_rows_ += record.accumulated_rows();
  declared_rows_ += record.declared_rows();
  bytes_ += record.bytes();
}

void Ledger::Uncount(const MicrobatchRecord& record) {
  begun_ -= record.begun() ? 1 : 0;
  half_done_ -= record.half_done() ? 1 : 0;
  accumulated_rows_ -= record.accumulated_rows();
  declared_rows_ -= record.declared_rows();
  bytes_ -= record.bytes();
}

template <typename Change>
void Ledger::Update(MicrobatchRecord& record, Change change) {
  Uncount(record);
  change();
  Count(record);
}

size_t MicrobatchTerms::DepthOf(int64_t row) const {
  const auto depth = std::upper_bound(depths.begin(), depths.end(), row,
                                      [](int64_t r, const DepthTerms& terms) { return r < terms.end; });
  return depth == depths.end() ? 0 : static_cast<size_t>(depth - depths.begin());
}

int64_t MicrobatchTerms::EndOfDepth(int64_t row) const {
  return depths.empty() ? microbatch_rows : depths[DepthOf(row)].end;
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
    if (!(it->second.terms() == terms)) {
      return OpenedOtherwise(
          id,
          " was opened before with other options (rows, loss options, dtype, reduction, normalizer, "
          "grad_output "
          "or depths; in deterministic mode also want_grad_hidden, want_row_entropy or whether there is a "
          "top_k)");
    }
    if (const auto row = it->second.FirstDiffering(rows, contents); row.has_value()) {
      return OpenedOtherwise(
          id, absl::StrCat(": row ", *row,
                           " was opened before with another target, weight or upstream gradient"));
    }
  }
  const MicrobatchRecord fresh(terms);  // the record of a new microbatch, until nothing can fail any more
  const std::vector<RowRange> pieces = (is_new ? fresh : it->second).Undeclared(rows);
  int64_t added = 0;
  int64_t bytes = is_new ? fresh.bytes() : 0;
  for (RowRange piece : pieces) {
    added += piece.size();
    bytes += MicrobatchRecord::BytesToDeclare(piece, contents);
  }
  LOSSD_RETURN_IF_ERROR(CheckLimits(id, is_new, added));
  LOSSD_RETURN_IF_ERROR(memory_.Take(bytes));
  if (is_new) {
    it = microbatches_.emplace(id, fresh).first;
    Count(it->second);
  }
  Update(it->second, [&] {
    for (RowRange piece : pieces) it->second.Declare(piece, rows, contents);
  });
  return absl::OkStatus();
}

void Ledger::Keep(uint64_t id, RowRange rows) {
  const auto it = microbatches_.find(id);
  if (it != microbatches_.end()) it->second.Keep(rows);
}

void Ledger::Withdraw(uint64_t id, RowRange rows, bool forget_empty) {
  const auto it = microbatches_.find(id);
  if (it == microbatches_.end()) return;
  MicrobatchRecord& record = it->second;
  const int64_t bytes_before = bytes_;
  Update(record, [&] { record.Withdraw(rows); });
  if (forget_empty && record.declared_rows() == 0 && !record.kept()) {
    Uncount(record);
    microbatches_.erase(it);
  }
  memory_.Give(bytes_before - bytes_);
}

std::optional<int64_t> Ledger::MicrobatchRows(uint64_t id) const {
  const auto it = microbatches_.find(id);
  if (it == microbatches_.end()) return std::nullopt;
  return it->second.terms().microbatch_rows;
}

RowValues Ledger::Contents(uint64_t id, RowRange rows) const { return microbatches_.at(id).Contents(rows); }

void Ledger::Clear() {
  microbatches_.clear();
  memory_.Give(bytes_);
  begun_ = 0;
  half_done_ = 0;
  accumulated_rows_ = 0;
  declared_rows_ = 0;
  bytes_ = 0;
}

// ---- Ledger: states of rows ----

int64_t Ledger::CountUnsettled(uint64_t id, RowRange rows) const {
  const auto it = microbatches_.find(id);
  return it == microbatches_.end() ? rows.size() : it->second.CountUnsettled(rows);
}

void Ledger::MarkUnsettled(uint64_t id, RowRange rows, absl::Span<uint8_t> mask) const {
  const auto it = microbatches_.find(id);
  if (it == microbatches_.end()) {
    std::fill(mask.begin(), mask.end(), uint8_t{1});
  } else {
    it->second.MarkUnsettled(rows, mask);
  }
}

bool Ledger::AnyReserved(uint64_t id, RowRange rows) const { return microbatches_.at(id).AnyReserved(rows); }

int64_t Ledger::Reserve(uint64_t id, RowRange rows, absl::Span<uint8_t> mask) {
  return microbatches_.at(id).Reserve(rows, mask);
}

int64_t Ledger::Commit(uint64_t id, RowRange rows) {
  MicrobatchRecord& record = microbatches_.at(id);
  int64_t committed = 0;
  Update(record, [&] { committed = record.Commit(rows); });
  return committed;
}

void Ledger::Release(uint64_t id, RowRange rows) { microbatches_.at(id).Release(rows); }

// ---- Ledger: what is missing, begun, complete ----

std::vector<std::string> Ledger::Missing(absl::Span<const uint64_t> ids, int max_lines) const {
  std::vector<std::string> lines;
  int64_t more = 0;
  auto it = microbatches_.begin();
  for (uint64_t id : ids) {
    // Fast in the usual case, where `ids` has all microbatches.
    if (it != microbatches_.end() && it->first < id) ++it;
    if (it == microbatches_.end() || it->first != id) it = microbatches_.lower_bound(id);
    const bool known = it != microbatches_.end() && it->first == id;
    if (known && it->second.complete()) continue;
    if (static_cast<int>(lines.size()) >= max_lines) {
      ++more;
    } else {
      lines.push_back(known ? Describe(id, it->second) : absl::StrCat("microbatch ", id, ": never opened"));
    }
  }
  if (more > 0) lines.push_back(absl::StrCat("and ", more, " more microbatches"));
  return lines;
}

std::vector<std::string> Ledger::Incomplete(absl::Span<const uint64_t> ids, int max_lines) const {
  std::vector<std::string> lines;
  if (half_done_ == 0) return lines;
  for (const auto& [id, microbatch] : microbatches_) {
    if (static_cast<int>(lines.size()) >= max_lines) break;
    if (!microbatch.half_done() || std::binary_search(ids.begin(), ids.end(), id)) continue;
    lines.push_back(absl::StrCat(Describe(id, microbatch), " (not expected, but begun)"));
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

// ---- Contributions: checks of their values ----

namespace {

// The bits of a floating-point type without the sign. Compared as integers, they order values by magnitude.
struct FloatBits {
  uint32_t mask;      // all bits but the sign
  uint32_t infinity;  // the least bits that are not finite

  static FloatBits Of(kernels::DType dtype) {
    switch (dtype) {
      case kernels::DType::kFloat16:
        return {0x7fffu, 0x7c00u};
      case kernels::DType::kBFloat16:
        return {0x7fffu, 0x7f80u};
      case kernels::DType::kFloat32:
        break;
    }
    return {0x7fffffffu, 0x7f800000u};
  }
};

// The value with these bits, which are those of a finite value without its sign.
float FiniteValue(kernels::DType dtype, uint32_t bits) {
  switch (dtype) {
    case kernels::DType::kFloat16: {
      const int exponent = static_cast<int>(bits >> 10);
      const auto fraction = static_cast<float>(bits & 0x3ffu);
      // A subnormal number if the exponent is 0; else the fraction has an implicit leading 1.
      return exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024.0f + fraction, exponent - 25);
    }
    case kernels::DType::kBFloat16:
      return std::bit_cast<float>(bits << 16);
    case kernels::DType::kFloat32:
      break;
  }
  return std::bit_cast<float>(bits);
}

// The bits of the least magnitude that overflows: it is not finite, or its product with the scale, rounded to
// fp32, is not finite. Found by bisection: `fits` never overflows, and `overflows` always does.
uint32_t LeastOverflowing(kernels::DType dtype, float scale) {
  uint32_t fits = 0;
  uint32_t overflows = FloatBits::Of(dtype).infinity;
  while (overflows - fits > 1) {
    const uint32_t middle = fits + (overflows - fits) / 2;
    (std::isfinite(FiniteValue(dtype, middle) * scale) ? fits : overflows) = middle;
  }
  return overflows;
}

// The index of the first element whose magnitude is at least `least`; -1 if there is none. Bits: an unsigned
// integer of the element's size.
template <typename Bits>
int64_t FirstAtLeast(absl::Span<const uint8_t> values, Bits mask, Bits least) {
  constexpr int64_t kBlock = 4096;  // elements that are tested together, without branches
  const int64_t count = static_cast<int64_t>(values.size() / sizeof(Bits));
  const auto is_less = [&](int64_t i) {
    Bits bits;  // elements may be unaligned
    std::memcpy(&bits, values.data() + static_cast<size_t>(i) * sizeof(Bits), sizeof(Bits));
    return static_cast<Bits>(bits & mask) < least;
  };
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(count, begin + kBlock);
    bool all = true;
    for (int64_t i = begin; i < end; ++i) all &= is_less(i);
    for (int64_t i = begin; !all && i < end; ++i) {
      if (!is_less(i)) return i;
    }
  }
  return -1;
}

int64_t FirstOverflowing(const ContributionTerms& terms, absl::Span<const uint8_t> values) {
  const uint32_t mask = FloatBits::Of(terms.dtype).mask;
  const uint32_t least = LeastOverflowing(terms.dtype, terms.scale);
  if (terms.dtype == kernels::DType::kFloat32) return FirstAtLeast<uint32_t>(values, mask, least);
  return FirstAtLeast<uint16_t>(values, static_cast<uint16_t>(mask), static_cast<uint16_t>(least));
}

}  // namespace

absl::Status CheckFinite(const Contribution& contribution, RowRange rows, absl::Span<const uint8_t> values) {
  const int64_t bad = FirstOverflowing(contribution.terms, values);
  if (bad < 0) return absl::OkStatus();
  return FieldError(
      absl::StatusCode::kOutOfRange,
      absl::StrCat("payload row ", rows.begin + bad / contribution.cols, " column ", bad % contribution.cols),
      absl::StrCat("must be finite, also after multiplication by open.scale ", contribution.terms.scale,
                   "; nothing of its slice was added"),
      "a value that is not finite");
}

std::vector<uint64_t> RowChecksums(absl::Span<const uint8_t> values, int64_t row_bytes) {
  const auto size = static_cast<size_t>(row_bytes);
  std::vector<uint64_t> checksums(values.size() / size);
  for (size_t row = 0; row < checksums.size(); ++row) {
    const uint64_t hash = XXH3_64bits(values.data() + row * size, size);
    checksums[row] = hash == 0 ? 1 : hash;  // in the ledger 0 means: not added yet
  }
  return checksums;
}

// ---- ContributionLedger ----

absl::Status ContributionLedger::CheckDeclare(uint64_t id, const ContributionTerms& terms) const {
  if (const auto it = contributions_.find(id); it != contributions_.end()) {
    if (it->second.terms == terms) return absl::OkStatus();
    return FieldError(absl::StatusCode::kFailedPrecondition, "open.contribution_id",
                      "was opened before with another parameter, rows, dtype or scale", absl::StrCat(id));
  }
  if (rows_ + terms.rows.size() > max_rows_) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the step's ledger holds ", rows_, " rows of contributions; ", terms.rows.size(),
        " more would exceed its limit of ", max_rows_, " (apply the step or zero its gradients)"));
  }
  if (contributions() >= max_contributions_) {
    return FieldError(absl::StatusCode::kResourceExhausted, "open.contribution_id",
                      absl::StrCat("must be one of the ", max_contributions_,
                                   " that the step has, as many as it may (apply it or zero its gradients)"),
                      absl::StrCat(id));
  }
  return absl::OkStatus();
}

absl::Status ContributionLedger::Declare(uint64_t id, const ContributionTerms& terms) {
  LOSSD_RETURN_IF_ERROR(CheckDeclare(id, terms));
  if (Contains(id)) return absl::OkStatus();
  LOSSD_RETURN_IF_ERROR(memory_.Take(kRecordBytes + terms.rows.size() * kRowBytes));
  Record entry{.terms = terms, .checksums = std::vector<uint64_t>(static_cast<size_t>(terms.rows.size()))};
  contributions_.emplace(id, std::move(entry));
  rows_ += terms.rows.size();
  return absl::OkStatus();
}

absl::StatusOr<std::vector<RowRange>> ContributionLedger::Pending(
    uint64_t id, RowRange rows, absl::Span<const uint64_t> checksums) const {
  const Record& entry = contributions_.at(id);
  std::vector<RowRange> pending;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const uint64_t known = entry.checksums[static_cast<size_t>(row - entry.terms.rows.begin)];
    if (known == checksums[static_cast<size_t>(row - rows.begin)]) continue;
    if (known != 0) {
      return FieldError(absl::StatusCode::kFailedPrecondition, absl::StrCat("payload row ", row),
                        absl::StrCat("was added before to contribution ", id, " with other values"),
                        "another checksum");
    }
    if (pending.empty() || pending.back().end != row) pending.push_back({row, row});
    ++pending.back().end;
  }
  return pending;
}

void ContributionLedger::Commit(uint64_t id, RowRange rows, absl::Span<const uint64_t> checksums) {
  Record& entry = contributions_.at(id);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    uint64_t& known = entry.checksums[static_cast<size_t>(row - entry.terms.rows.begin)];
    if (known == 0) ++entry.added_rows;
    known = checksums[static_cast<size_t>(row - rows.begin)];
  }
}

bool ContributionLedger::Complete(uint64_t id) const { return contributions_.at(id).complete(); }

std::string ContributionLedger::DescribeMissing(uint64_t id) const {
  const Record& entry = contributions_.at(id);
  MissingRows missing;
  for (size_t i = 0; i < entry.checksums.size(); ++i) {
    const int64_t row = entry.terms.rows.begin + static_cast<int64_t>(i);
    if (entry.checksums[i] == 0) missing.Add({row, row + 1});
  }
  return absl::StrCat("contribution ", id, ": ", missing.ToText(), " of ", Text(entry.terms.rows));
}

std::vector<std::string> ContributionLedger::Incomplete(absl::Span<const uint64_t> ids, int max_lines) const {
  std::vector<std::string> lines;
  for (const auto& [id, entry] : contributions_) {
    if (static_cast<int>(lines.size()) >= max_lines) break;
    if (entry.added_rows == 0 || entry.complete() || std::binary_search(ids.begin(), ids.end(), id)) continue;
    lines.push_back(absl::StrCat(DescribeMissing(id), " (not expected, but begun)"));
  }
  return lines;
}

std::vector<uint64_t> ContributionLedger::CompleteIds() const {
  std::vector<uint64_t> ids;
  for (const auto& [id, entry] : contributions_) {
    if (entry.complete()) ids.push_back(id);
  }
  return ids;
}

int64_t ContributionLedger::begun_contributions() const {
  return std::count_if(contributions_.begin(), contributions_.end(), [](const auto& contribution) {
    return contribution.second.added_rows > 0 || contribution.second.complete();
  });
}

void ContributionLedger::Clear() {
  memory_.Give(bytes());
  contributions_.clear();
  rows_ = 0;
}

// ---- StepLedgers ----

namespace {

void Append(std::vector<std::string> more, std::vector<std::string>& lines) {
  lines.insert(lines.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
}

}  // namespace

std::vector<std::string> StepLedgers::Missing(absl::Span<const uint64_t> ids) const {
  std::vector<std::string> lines;
  std::vector<uint64_t> of_microbatches;
  for (uint64_t id : ids) {
    if (!contributions.Contains(id)) {
      of_microbatches.push_back(id);
    } else if (!contributions.Complete(id)) {
      lines.push_back(contributions.DescribeMissing(id));
    }
  }
  Append(microbatches.Missing(of_microbatches), lines);
  return lines;
}

std::vector<std::string> StepLedgers::Incomplete(absl::Span<const uint64_t> ids) const {
  std::vector<std::string> lines = microbatches.Incomplete(ids);
  Append(contributions.Incomplete(ids), lines);
  return lines;
}

std::vector<uint64_t> StepLedgers::CompleteIds() const {
  const std::vector<uint64_t> of_microbatches = microbatches.CompleteIds();
  const std::vector<uint64_t> of_contributions = contributions.CompleteIds();
  std::vector<uint64_t> ids;
  std::merge(of_microbatches.begin(), of_microbatches.end(), of_contributions.begin(), of_contributions.end(),
             std::back_inserter(ids));
  return ids;
}

void StepLedgers::Clear() {
  microbatches.Clear();
  contributions.Clear();
}

}  // namespace lossd::engine
