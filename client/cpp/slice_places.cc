// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/slice_places.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "client/cpp/cuda_driver.h"

namespace lossd::client::internal {
namespace {

uint64_t ShareOf(const SharedRegion& region) { return ShareOfRegion(region.size()); }

}  // namespace

SlicePlaces::SlicePlaces(std::shared_ptr<SharedRegion> region, bool may_wait, std::optional<int> gpu)
    : region_(std::move(region)), may_wait_(may_wait), copiers_(CopiersFor(region_.get(), gpu)) {}

SlicePlaces::Copiers SlicePlaces::CopiersFor(const SharedRegion* region, std::optional<int> gpu) {
  const std::optional<int> owner = region == nullptr ? std::nullopt : region->gpu();
  if (!owner.has_value()) return {gpu, gpu};
  // Of two GPUs each writes what it has to the other's memory: reading from there is far slower on some.
  const bool both = gpu.has_value() && *gpu != *owner;
  if (both && LetReach(region->At(0), region->size(), *owner, *gpu)) return {gpu, owner};
  return {owner, owner};
}

SliceRule SlicePlaces::RuleFor(const SliceRule& rule, Rows rows, uint64_t row_bytes) const {
  if (region_ == nullptr) return rule;
  return InRegion(rule, rows.size(), WantedRows(region_->size(), region_->gpu().has_value(), row_bytes));
}

void SlicePlaces::Name(const StreamWork& work, v1::ComputeLossRequest* first) {
  if (region_ == nullptr) return;
  after_ = work.after;
  if (!work.server_cuts) {
    first->mutable_open()->set_region(region_->id());
    return;
  }
  if (work.outputs.grad_hidden == nullptr || work.rows.size() == 0) return;
  absl::MutexLock lock(&mu_);
  uint64_t rows = std::min(work.rows.size(), ShareOf(*region_) / work.row_bytes);
  for (; rows > 0 && !room_.has_value(); rows /= 2) {
    const std::optional<uint64_t> offset = region_->Take(rows * work.row_bytes);
    if (offset.has_value()) room_ = {*offset, rows * work.row_bytes, work.rows.begin, work.row_bytes};
  }
  if (!room_.has_value()) return;
  v1::OpenBackward* const open = first->mutable_backward();
  open->set_region(region_->id());
  open->mutable_in_region()->set_offset(room_->offset);
  open->mutable_in_region()->set_bytes(room_->bytes);
}

absl::StatusOr<SlicePlaces::Place> SlicePlaces::Put(uint64_t row, absl::Span<const uint8_t> hidden) {
  if (region_ == nullptr || hidden.empty()) return Place();
  Place place;
  {
    absl::MutexLock lock(&mu_);
    const bool more_than_share = !taken_.empty() && taken_bytes_ + hidden.size() > ShareOf(*region_);
    const std::optional<uint64_t> offset = more_than_share ? std::nullopt : region_->Take(hidden.size());
    if (!offset.has_value()) return Place{WithoutRoom(hidden.size())};
    taken_[row] = {*offset, hidden.size()};
    taken_bytes_ += hidden.size();
    place = {Place::Kind::kRegion, *offset};
  }
  const absl::Status copied =
      CopyBytes(region_->At(place.offset), hidden.data(), hidden.size(), copiers_.to_region, after_.get());
  if (!copied.ok()) return copied;
  return place;
}

SlicePlaces::Place::Kind SlicePlaces::WithoutRoom(uint64_t bytes) {
  if (!may_wait_) return Place::Kind::kMessage;
  if (!taken_.empty()) return Place::Kind::kWait;
  // A call that has nothing in the region cannot wait for its own answers.
  const bool waits = freed_ != nullptr && region_->Await(bytes, this, freed_);
  return waits ? Place::Kind::kWaitForOthers : Place::Kind::kMessage;
}

bool SlicePlaces::WaitForOthers(std::function<void()> freed) {
  if (region_ == nullptr || !may_wait_) return false;
  absl::MutexLock lock(&mu_);
  freed_ = std::move(freed);
  return true;
}

void SlicePlaces::StopWaitingForOthers() {
  if (region_ == nullptr) return;
  absl::MutexLock lock(&mu_);
  freed_ = nullptr;
  region_->StopWaiting(this);
}

const uint8_t* SlicePlaces::Find(uint64_t row, uint64_t bytes) const {
  absl::MutexLock lock(&mu_);
  if (room_.has_value()) {
    const uint64_t before = (row - room_->first_row) * room_->row_bytes;
    const bool inside = row >= room_->first_row && before <= room_->bytes && bytes <= room_->bytes - before;
    return inside ? region_->At(room_->offset + before) : nullptr;
  }
  const auto place = taken_.find(row);
  return place == taken_.end() || place->second.bytes != bytes ? nullptr : region_->At(place->second.offset);
}

absl::Status SlicePlaces::Fetch(const uint8_t* from, uint64_t bytes, void* to) const {
  return CopyBytes(to, from, bytes, copiers_.from_region, after_.get());
}

void SlicePlaces::Free(uint64_t row) {
  absl::MutexLock lock(&mu_);
  const auto place = taken_.find(row);
  if (place == taken_.end()) return;
  region_->Give(place->second.offset);
  taken_bytes_ -= place->second.bytes;
  taken_.erase(place);
}

void SlicePlaces::End(const absl::Status& status) {
  StopWaitingForOthers();
  if (region_ == nullptr) return;
  absl::MutexLock lock(&mu_);
  if (status.ok()) {
    if (room_.has_value()) region_->Give(room_->offset);
  } else {
    region_->AfterFailure(status, !taken_.empty() || room_.has_value());
  }
}

}  // namespace lossd::client::internal
