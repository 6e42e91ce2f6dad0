// SPDX-License-Identifier: Apache-2.0
#include "server/engine/contribution_ledger.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/errors.h"

namespace lossd::engine {

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
  if (auto status = CheckDeclare(id, terms); !status.ok()) return status;
  if (Contains(id)) return absl::OkStatus();
  if (auto status = memory_.Take(kRecordBytes + terms.rows.size() * kRowBytes); !status.ok()) return status;
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
  constexpr size_t kMaxRanges = 8;
  const Record& entry = contributions_.at(id);
  std::vector<RowRange> missing;
  for (size_t i = 0; i < entry.checksums.size(); ++i) {
    if (entry.checksums[i] != 0) continue;
    const int64_t row = entry.terms.rows.begin + static_cast<int64_t>(i);
    if (missing.empty() || missing.back().end != row) missing.push_back({row, row});
    ++missing.back().end;
  }
  std::string text = absl::StrCat("contribution ", id, ": rows ");
  for (size_t i = 0; i < missing.size() && i < kMaxRanges; ++i) {
    absl::StrAppend(&text, i == 0 ? "" : ", ", Text(missing[i]));
  }
  if (missing.size() > kMaxRanges)
    absl::StrAppend(&text, " and ", missing.size() - kMaxRanges, " more ranges");
  return absl::StrCat(text, " of ", Text(entry.terms.rows));
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

}  // namespace lossd::engine
