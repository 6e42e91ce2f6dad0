// SPDX-License-Identifier: Apache-2.0
#include "kernels/group/group_chunk.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kernels/absent_row.h"

namespace lossd::kernels {
namespace {

// A part whose rows are all ignored or absent says nothing of how gradients were computed.
int64_t RowsThatCount(const std::vector<Slice>& slices) {
  int64_t rows = 0;
  for (const Slice& slice : slices) {
    for (int64_t row = 0; row < slice.rows; ++row) {
      rows += slice.targets[row] != kIgnoredTarget && !IsAbsent(slice, row) ? 1 : 0;
    }
  }
  return rows;
}

}  // namespace

GroupChunk::GroupChunk(Chunk* whole, ChunkCallbacks callbacks, std::vector<ChunkPart> parts)
    : whole_(whole),
      callbacks_(std::move(callbacks)),
      divided_(std::move(parts)),
      parts_(divided_.size()),
      without_results_(divided_.size()),
      unfinished_(divided_.size()) {
  for (size_t i = 0; i < parts_.size(); ++i) {
    Part& part = parts_[i];
    for (const size_t slice : divided_[i].slices) part.slices.push_back(whole->slices[slice]);
    part.chunk.options = whole->options;
    part.chunk.hidden_dtype = whole->hidden_dtype;
    part.chunk.accumulate_gradients = whole->accumulate_gradients;
    part.chunk.independent = whole->independent;
    part.chunk.turn = whole->turn;
    part.chunk.retained = whole->retained;
    part.chunk.slices = absl::MakeSpan(part.slices);
  }
}

GroupChunk::GroupChunk(absl::Status refusal, ChunkCallbacks callbacks)
    : whole_(nullptr),
      callbacks_(std::move(callbacks)),
      refusal_(std::move(refusal)),
      without_results_(0),
      unfinished_(0) {}

bool GroupChunk::OnResults(size_t part, const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  parts_[part].results = status;
  return --without_results_ == 0;
}

bool GroupChunk::OnDone(size_t part, const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  parts_[part].done = status;
  return --unfinished_ == 0;
}

void GroupChunk::CallResults() {
  absl::Status status = refusal_;
  for (const Part& part : parts_) status.Update(part.results);
  if (status.ok()) {
    CollectSlices();
    CollectChoices();
  }
  callbacks_.on_results(std::move(status));
}

void GroupChunk::CallDone() { callbacks_.on_done(DoneStatus()); }

void GroupChunk::CollectSlices() {
  for (size_t i = parts_.size(); i-- > 0;) {  // so that the first part of a slice says the last word
    for (size_t j = 0; j < parts_[i].slices.size(); ++j) {
      Slice& slice = whole_->slices[divided_[i].slices[j]];
      slice.first_nonfinite_row = parts_[i].slices[j].first_nonfinite_row;
      slice.sums = parts_[i].slices[j].sums;
    }
  }
}

void GroupChunk::CollectChoices() {
  std::vector<int64_t> rows;
  for (const Part& part : parts_) rows.push_back(RowsThatCount(part.slices));
  const auto largest = std::max_element(rows.begin(), rows.end()) - rows.begin();
  const Chunk& said = parts_[static_cast<size_t>(largest)].chunk;
  whole_->choices = said.choices;
  whole_->gradients = said.gradients;
  whole_->sample_threshold = said.sample_threshold;
}

absl::Status GroupChunk::DoneStatus() const {
  absl::Status status = refusal_;
  absl::Status results = refusal_;
  bool accumulated = false;
  for (const Part& part : parts_) {
    status.Update(part.done);
    results.Update(part.results);
    accumulated = accumulated || (part.results.ok() && part.chunk.accumulate_gradients);
  }
  if (results.ok() || !accumulated) return status;
  return absl::DataLossError(
      absl::StrCat("some of the devices that share a chunk failed: ", results.message()));
}

}  // namespace lossd::kernels
