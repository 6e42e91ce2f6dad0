// SPDX-License-Identifier: Apache-2.0
#include "server/regions/region_memory.h"

#include <cstring>
#include <utility>

#include "kernels/device_memory_sharer.h"
#include "kernels/staging_adopter.h"
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
  auto staging = kernels::AdoptStaging(backend, (*memory)->bytes(), {.descriptor = (*memory)->descriptor()});
  if (!staging.ok()) return staging.status();
  return std::make_unique<OfHost>(*std::move(memory), *std::move(staging));
}

absl::StatusOr<std::unique_ptr<RegionMemory>> DeviceRegionMemory(kernels::Backend* backend,
                                                                 const std::string& device, int64_t bytes) {
  auto* const sharer = dynamic_cast<kernels::DeviceMemorySharer*>(backend);
  if (sharer == nullptr) return absl::UnimplementedError("the server shares no memory of a GPU");
  auto memory = sharer->ShareDeviceMemory(device, bytes);
  if (!memory.ok()) return memory.status();
  return std::make_unique<OfDevice>(*std::move(memory), device);
}

std::vector<std::string> SharingDevices(kernels::Backend* backend) {
  const auto* const sharer = dynamic_cast<kernels::DeviceMemorySharer*>(backend);
  return sharer == nullptr ? std::vector<std::string>() : sharer->SharingDevices();
}

}  // namespace lossd::regions
