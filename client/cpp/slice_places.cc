#include "client/cpp/slice_places.h"

#include <cstring>
#include <utility>

namespace lossd::client::internal {
namespace {

// So that the calls of several microbatches find room beside each other.
constexpr uint64_t kCallsPerRegion = 4;

}  // namespace

SlicePlaces::SlicePlaces(std::shared_ptr<SharedRegion> region, bool may_wait)
    : region_(std::move(region)), may_wait_(may_wait) {}

SlicePlaces::Place SlicePlaces::Put(uint64_t row, absl::Span<const uint8_t> hidden) {
  if (region_ == nullptr || hidden.empty()) return {};
  Place place;
  {
    absl::MutexLock lock(&mu_);
    // A call that has nothing in the region cannot wait for its own answers.
    const Place::Kind otherwise = may_wait_ && !taken_.empty() ? Place::Kind::kWait : Place::Kind::kMessage;
    const uint64_t share = region_->size() / kCallsPerRegion;
    if (!taken_.empty() && taken_bytes_ + hidden.size() > share) return {otherwise};
    const std::optional<uint64_t> offset = region_->Take(hidden.size());
    if (!offset.has_value()) return {otherwise};
    taken_[row] = {*offset, hidden.size()};
    taken_bytes_ += hidden.size();
    place = {Place::Kind::kRegion, *offset};
  }
  std::memcpy(region_->At(place.offset), hidden.data(), hidden.size());
  return place;
}

const uint8_t* SlicePlaces::Find(uint64_t row) const {
  absl::MutexLock lock(&mu_);
  const auto place = taken_.find(row);
  return place == taken_.end() ? nullptr : region_->At(place->second.offset);
}

void SlicePlaces::Free(uint64_t row) {
  absl::MutexLock lock(&mu_);
  const auto place = taken_.find(row);
  if (place == taken_.end()) return;
  region_->Give(place->second.offset);
  taken_bytes_ -= place->second.bytes;
  taken_.erase(place);
}

void SlicePlaces::AbandonAfter(const absl::Status& error) {
  if (region_ == nullptr) return;
  absl::MutexLock lock(&mu_);
  if (!taken_.empty() || absl::IsUnavailable(error)) region_->Retire();
}

}  // namespace lossd::client::internal
