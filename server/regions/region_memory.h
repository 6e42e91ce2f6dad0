// SPDX-License-Identifier: Apache-2.0
// The memory of a region: of the host, or of a device of the server.
#ifndef LOSSD_SERVER_REGIONS_REGION_MEMORY_H_
#define LOSSD_SERVER_REGIONS_REGION_MEMORY_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/backend.h"

namespace lossd::regions {

// The client may write to it at any time. Thread-safe.
class RegionMemory {
 public:
  virtual ~RegionMemory() = default;
  // The backend can use it as staging memory. If it is of a device, code of the host must not follow these
  // addresses.
  virtual absl::Span<uint8_t> bytes() const = 0;
  // What the client maps it by; stays this object's.
  virtual int descriptor() const = 0;
  // The GPU that it is of, "GPU-..."; empty: memory of the host.
  virtual const std::string& device() const = 0;
  // Copies `from`, a part of bytes(), to memory of the host, or the other way, and waits for it. UNAVAILABLE:
  // the device is lost.
  virtual absl::Status CopyToHost(absl::Span<const uint8_t> from, uint8_t* to) const = 0;
  virtual absl::Status CopyFromHost(const uint8_t* from, absl::Span<uint8_t> to) const = 0;
};

// At least `bytes` > 0, in whole pages. RESOURCE_EXHAUSTED, or the backend's error. The backend outlives it.
absl::StatusOr<std::unique_ptr<RegionMemory>> HostRegionMemory(kernels::Backend* backend, int64_t bytes);
// The same of the GPU `device`, one of SharingDevices; UNIMPLEMENTED if it cannot be shared.
absl::StatusOr<std::unique_ptr<RegionMemory>> DeviceRegionMemory(kernels::Backend* backend,
                                                                 const std::string& device, int64_t bytes);

// The GPUs whose memory DeviceRegionMemory gives, in the order of the backend's devices; empty: there is
// none.
std::vector<std::string> SharingDevices(kernels::Backend* backend);

}  // namespace lossd::regions

#endif  // LOSSD_SERVER_REGIONS_REGION_MEMORY_H_
