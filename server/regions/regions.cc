// SPDX-License-Identifier: Apache-2.0
#include "server/regions/regions.h"

#include <sys/random.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/backend.h"
#include "kernels/errors/field_error.h"
#include "proto/wire/region_packets.h"
#include "server/log/log.h"
#include "server/memory/shared_memory.h"

namespace lossd::regions {
namespace {

class OfHost final : public RegionMemory {
 public:
  OfHost(std::unique_ptr<memory::SharedMemory> memory, std::unique_ptr<kernels::StagingMemory> staging)
      : memory_(std::move(memory)), staging_(std::move(staging)) {}

  absl::Span<uint8_t> bytes() const override { return memory_->bytes(); }
  int descriptor() const override { return memory_->descriptor(); }
  const std::string& device() const override { return none_; }
  absl::Status CopyToHost(absl::Span<const uint8_t> from, uint8_t* to) const override {
    if (to != from.data()) std::memcpy(to, from.data(), from.size());
    return absl::OkStatus();
  }
  absl::Status CopyFromHost(const uint8_t* from, absl::Span<uint8_t> to) const override {
    if (to.data() != from) std::memcpy(to.data(), from, to.size());
    return absl::OkStatus();
  }

 private:
  const std::string none_;
  const std::unique_ptr<memory::SharedMemory> memory_;
  const std::unique_ptr<kernels::StagingMemory> staging_;  // the same memory, as the backend knows it
};

class OfDevice final : public RegionMemory {
 public:
  OfDevice(std::unique_ptr<kernels::SharedDeviceMemory> memory, std::string device)
      : memory_(std::move(memory)), device_(std::move(device)) {}

  absl::Span<uint8_t> bytes() const override { return memory_->bytes(); }
  int descriptor() const override { return memory_->descriptor(); }
  const std::string& device() const override { return device_; }
  absl::Status CopyToHost(absl::Span<const uint8_t> from, uint8_t* to) const override {
    return memory_->CopyToHost(from, to);
  }
  absl::Status CopyFromHost(const uint8_t* from, absl::Span<uint8_t> to) const override {
    return memory_->CopyFromHost(from, to);
  }

 private:
  const std::unique_ptr<kernels::SharedDeviceMemory> memory_;
  const std::string device_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<RegionMemory>> HostRegionMemory(kernels::Backend* backend, int64_t bytes) {
  absl::StatusOr<std::unique_ptr<memory::SharedMemory>> memory = memory::SharedMemory::Create(bytes);
  if (!memory.ok()) return memory.status();
  auto staging = backend->AdoptStaging((*memory)->bytes(), {.descriptor = (*memory)->descriptor()});
  if (!staging.ok()) return staging.status();
  return std::make_unique<OfHost>(*std::move(memory), *std::move(staging));
}

absl::StatusOr<std::unique_ptr<RegionMemory>> DeviceRegionMemory(kernels::Backend* backend,
                                                                 const std::string& device, int64_t bytes) {
  auto memory = backend->ShareDeviceMemory(device, bytes);
  if (!memory.ok()) return memory.status();
  return std::make_unique<OfDevice>(*std::move(memory), device);
}

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

Regions::Regions(kernels::Backend* backend, const RegionLimits& limits, double peer_share)
    : backend_(backend), devices_(backend->SharingDevices()) {
  budgets_[""] = std::make_shared<RegionBudget>(limits.host_bytes, peer_share);
  for (const std::string& device : devices_) {
    budgets_[device] = std::make_shared<RegionBudget>(limits.device_bytes, peer_share);
  }
}

absl::StatusOr<std::shared_ptr<Region>> Regions::Create(const std::string& holder, const std::string& device,
                                                        int64_t bytes) {
  const auto found = budgets_.find(device);
  if (found == budgets_.end()) {
    return errors::FieldError(
        "device", absl::StrCat("be one of the server's GPUs, ", absl::StrJoin(devices_, ", ")), device);
  }
  const std::shared_ptr<RegionBudget>& budget = found->second;
  const auto taken = std::make_shared<const Taken>(budget, holder,
                                                   budget->Take(holder, bytes, std::min(bytes, kLeastBytes)));
  if (taken->bytes() == 0) {
    return absl::ResourceExhaustedError(
        device.empty()
            ? std::string("--shared_memory_bytes has nothing left for this process")
            : absl::StrCat("--shared_device_memory_bytes has nothing left for this process on ", device));
  }
  absl::StatusOr<std::string> id = DrawId();
  if (!id.ok()) return id.status();
  absl::StatusOr<std::unique_ptr<RegionMemory>> memory = Allocate(device, taken->bytes());
  if (!memory.ok()) return memory.status();
  auto region = std::make_unique<Region>(*id, *std::move(memory));
  // The bytes are given back after the memory.
  std::shared_ptr<Region> shared(region.release(), [taken](const Region* gone) { delete gone; });
  absl::MutexLock lock(&mutex_);
  entries_[*std::move(id)] = {.region = shared};
  return shared;
}

absl::StatusOr<std::unique_ptr<RegionMemory>> Regions::Allocate(const std::string& device, int64_t bytes) {
  if (device.empty()) return HostRegionMemory(backend_, bytes);
  absl::StatusOr<std::unique_ptr<RegionMemory>> memory = DeviceRegionMemory(backend_, device, bytes);
  if (!absl::IsUnimplemented(memory.status())) return memory;
  absl::MutexLock lock(&mutex_);
  if (refusals_logged_.insert(device).second) {
    log::Log(log::LogLevel::kWarning, "no memory of a GPU for clients",
             {{"device", device}, {"error", memory.status().message()}});
  }
  return memory;
}

std::vector<RegionUse> Regions::Uses() const {
  std::vector<RegionUse> uses;
  const auto add = [&](const std::string& device) {
    const RegionBudget& budget = *budgets_.at(device);
    uses.push_back({device, budget.used(), budget.limit()});
  };
  add("");
  for (const std::string& device : devices_) add(device);
  return uses;
}

int64_t Regions::used_bytes() const {
  int64_t bytes = 0;
  for (const auto& [device, budget] : budgets_) bytes += budget->used();
  return bytes;
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
