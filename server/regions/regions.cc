// SPDX-License-Identifier: Apache-2.0
#include "server/regions/regions.h"

#include <sys/random.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/wire/region_packets.h"

namespace lossd::regions {
namespace {

absl::StatusOr<std::string> DrawId() {
  std::string id(wire::kRegionIdBytes, '\0');
  if (getrandom(id.data(), id.size(), 0) != static_cast<ssize_t>(id.size()))
    return absl::ResourceExhaustedError("the system has no random numbers");
  return id;
}

// Bytes of a budget, given back at the end.
class Taken {
 public:
  Taken(std::shared_ptr<RegionBudget> budget, std::string holder, int64_t bytes)
      : budget_(std::move(budget)), holder_(std::move(holder)), bytes_(bytes) {}
  ~Taken() { budget_->Give(holder_, bytes_); }
  Taken(const Taken&) = delete;
  Taken& operator=(const Taken&) = delete;

  int64_t bytes() const { return bytes_; }

 private:
  const std::shared_ptr<RegionBudget> budget_;
  const std::string holder_;
  const int64_t bytes_;
};

}  // namespace

int64_t RegionBudget::Take(absl::string_view holder, int64_t bytes, int64_t least) {
  absl::MutexLock lock(&mutex_);
  for (int64_t amount = std::min(bytes, most_); amount >= least && amount > 0; amount /= 2) {
    if (shares_.Take(holder, amount) == engine::FairShare::Answer::kYes) return amount;
  }
  return 0;
}

void RegionBudget::Give(absl::string_view holder, int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  shares_.Give(holder, bytes);
}

int64_t RegionBudget::used() const {
  absl::MutexLock lock(&mutex_);
  return shares_.used();
}

absl::StatusOr<std::shared_ptr<Region>> Regions::Create(const std::string& holder, Kind kind, int64_t bytes) {
  const bool of_device = kind == Kind::kDevice;
  const std::shared_ptr<RegionBudget>& budget = of_device ? device_budget_ : host_budget_;
  const auto taken = std::make_shared<const Taken>(budget, holder,
                                                   budget->Take(holder, bytes, std::min(bytes, kLeastBytes)));
  if (taken->bytes() == 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat(of_device ? "--shared_device_memory_bytes" : "--shared_memory_bytes",
                     " has nothing left for this process"));
  }
  absl::StatusOr<std::string> id = DrawId();
  if (!id.ok()) return id.status();
  absl::StatusOr<std::unique_ptr<RegionMemory>> memory =
      of_device ? DeviceRegionMemory(backend_, taken->bytes()) : HostRegionMemory(backend_, taken->bytes());
  if (!memory.ok()) return memory.status();
  auto region = std::make_unique<Region>(*id, *std::move(memory));
  // The bytes are given back after the memory.
  std::shared_ptr<Region> shared(region.release(), [taken](const Region* gone) { delete gone; });
  absl::MutexLock lock(&mutex_);
  entries_[*std::move(id)] = {.region = shared};
  return shared;
}

void Regions::Forget(const std::string& id) {
  std::shared_ptr<Region> forgotten;  // its memory is given back without the lock
  absl::MutexLock lock(&mutex_);
  const auto entry = entries_.find(id);
  if (entry == entries_.end()) return;
  forgotten = std::move(entry->second.region);
  entries_.erase(entry);
}

std::shared_ptr<Region> Regions::Claim(absl::string_view id, absl::string_view identity) {
  absl::MutexLock lock(&mutex_);
  const auto entry = entries_.find(id);
  if (entry == entries_.end()) return nullptr;
  std::optional<std::string>& owner = entry->second.owner;
  if (!owner.has_value()) owner = std::string(identity);
  return *owner == identity ? entry->second.region : nullptr;
}

}  // namespace lossd::regions
