// What the ledger says to people and to ApplyStep: what is missing, begun, complete. The rest is in
// ledger.cc.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/engine/errors.h"
#include "server/engine/ledger.h"

namespace lossd::engine {

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
      if (!IsSettled(segment.states[i])) note(row, row + 1);
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
  auto it = microbatches_.begin();
  for (uint64_t id : ids) {
    if (it != microbatches_.end() && it->first < id) ++it;  // the usual case: the ids are all there are
    if (it == microbatches_.end() || it->first != id) it = microbatches_.lower_bound(id);
    const bool known = it != microbatches_.end() && it->first == id;
    if (known && it->second.complete()) continue;
    if (static_cast<int>(lines.size()) >= max_lines) {
      ++more;
    } else {
      lines.push_back(known ? DescribeMissing(id, it->second)
                            : absl::StrCat("microbatch ", id, ": never opened"));
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

}  // namespace lossd::engine
