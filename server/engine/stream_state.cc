// SPDX-License-Identifier: Apache-2.0
#include "server/engine/stream_state.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/errors.h"

namespace lossd::engine {

absl::StatusOr<std::shared_ptr<StreamState>> StreamState::Create(StreamSpec spec,
                                                                 const kernels::HeadConfig& config,
                                                                 HeadState state, SliceLimits limits,
                                                                 std::shared_ptr<StreamObserver> observer) {
  auto rows = StreamRows::Create(std::move(spec), config, state, limits);
  if (!rows.ok()) return rows.status();
  return std::make_shared<StreamState>(*std::move(rows), std::move(observer));
}

StreamState::StreamState(StreamRows rows, std::shared_ptr<StreamObserver> observer)
    : StreamRows(std::move(rows)),
      observer_(std::move(observer)),
      sent_(static_cast<size_t>(spec().rows.size())),
      unsent_rows_(spec().rows.size()),
      unsent_valid_rows_(valid_rows()) {
  summary_.state = head_state();
  summary_.valid_rows = valid_rows();
  summary_.normalizer = terms().normalizer;
}

absl::Status StreamState::CheckNew(RowRange rows, int64_t bytes, bool in_place) const {
  if (half_closed_) return InvalidField("slice.rows", "came after the half-close", Text(rows));
  if (absl::Status status = CheckSlice(rows, bytes, in_place); !status.ok()) return status;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    if (sent_[Index(row)]) return InvalidField("slice.rows", absl::StrCat("repeats row ", row), Text(rows));
  }
  if (!limits().has_grid()) return absl::OkStatus();
  if (rows.begin < sent_end_) {
    return InvalidField(
        "slice.rows",
        absl::StrCat("must come in ascending order on a deterministic server, after row ", sent_end_ - 1),
        Text(rows));
  }
  if (rows.end > limits().NextGridRow(rows.begin)) {
    return InvalidField("slice.rows",
                        absl::StrCat("must not hold rows on both sides of a multiple of ", limits().row_grid,
                                     " (SliceLimits.row_grid)"),
                        Text(rows));
  }
  return absl::OkStatus();
}

absl::Status StreamState::AddSlice(RowRange rows, int64_t bytes, bool in_place) {
  if (absl::Status status = CheckNew(rows, bytes, in_place); !status.ok()) return status;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    sent_[Index(row)] = 1;
    if (HasTarget(row)) --unsent_valid_rows_;
  }
  unsent_rows_ -= rows.size();
  sent_end_ = rows.end;
  ++receiving_;
  return absl::OkStatus();
}

void StreamState::OnQueued() {
  --receiving_;
  ++outstanding_;
}

void StreamState::FinishSlice(const kernels::SliceSums& sums, int64_t accumulated, int64_t repeated,
                              double queue_seconds, double compute_seconds) {
  summary_.loss_sum += sums.loss;
  summary_.z_loss_sum += sums.z_loss;
  summary_.entropy_sum += sums.entropy;
  summary_.dropped_mass += sums.dropped_mass;
  summary_.sampling_variance += sums.sampling_variance;
  summary_.squared_gradient += sums.squared_gradient;
  summary_.correct_rows += sums.correct_rows;
  summary_.accumulated_rows += accumulated;
  summary_.repeated_rows += repeated;
  summary_.queue_seconds += queue_seconds;
  summary_.compute_seconds += compute_seconds;
}

absl::Status StreamState::HalfClose() {
  half_closed_ = true;
  if (unsent_valid_rows_ == 0) return absl::OkStatus();
  int64_t missing = spec().rows.begin;
  while (sent_[Index(missing)] || !HasTarget(missing)) ++missing;
  return InvalidField("slice.rows",
                      absl::StrCat("must cover every row with a target before the half-close; ",
                                   unsent_valid_rows_, " are missing"),
                      absl::StrCat("nothing for row ", missing));
}

void StreamState::Fail(absl::Status status) {
  if (status_.ok() && !finished_) status_ = std::move(status);
}

bool StreamState::ReadyToFinish() const {
  if (!started_ || finished_ || outstanding_ > 0) return false;
  if (failed()) return true;
  return receiving_ == 0 && (unsent_rows_ == 0 || (half_closed_ && unsent_valid_rows_ == 0));
}

}  // namespace lossd::engine
