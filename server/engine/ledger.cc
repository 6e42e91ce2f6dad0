// SPDX-License-Identifier: Apache-2.0
#include "server/engine/ledger.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"
#include "server/engine/errors.h"

namespace lossd::engine {
namespace {

// "open.microbatch_id <id><how>"
absl::Status OpenedOtherwise(uint64_t id, absl::string_view how) {
  return errors::WithViolation(
      absl::FailedPreconditionError(absl::StrCat("open.microbatch_id ", id, how)),
      {"open.microbatch_id", "must be opened again as it was opened before", absl::StrCat(id)});
}

std::string Describe(uint64_t id, const MicrobatchRecord& record) {
  return absl::StrCat("microbatch ", id, ": ", record.DescribeMissing());
}

}  // namespace

// ---- Declared rows ----

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
          " was opened before with other options (rows, loss options, dtype, reduction, normalizer or "
          "grad_output; in deterministic mode also want_grad_hidden or want_row_entropy)");
    }
    if (const auto row = it->second.FirstDiffering(rows, contents); row.has_value()) {
      return OpenedOtherwise(
          id, absl::StrCat(": row ", *row,
                           " was opened before with another target, weight or upstream gradient"));
    }
  }
  const MicrobatchRecord fresh(terms);
  const std::vector<RowRange> pieces = (is_new ? fresh : it->second).Undeclared(rows);
  int64_t added = 0;
  int64_t bytes = is_new ? fresh.bytes() : 0;
  for (RowRange piece : pieces) {
    added += piece.size();
    bytes += MicrobatchRecord::BytesToDeclare(piece, contents);
  }
  if (auto status = CheckLimits(id, is_new, added); !status.ok()) return status;
  if (auto status = memory_.Take(bytes); !status.ok()) return status;
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

// ---- States of rows ----

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

// ---- What is missing, begun, complete ----

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

}  // namespace lossd::engine
