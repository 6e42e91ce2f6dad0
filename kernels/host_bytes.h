// Retained memory that the host can read as it is: where other processes compute the rows whose hidden states
// are there (docs/scaling.md). Memory of CPU backends is HostBytes besides.
#ifndef LOSSD_KERNELS_HOST_BYTES_H_
#define LOSSD_KERNELS_HOST_BYTES_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/backend.h"

namespace lossd::kernels {

// Thread-safe.
class HostBytes {
 public:
  virtual ~HostBytes() = default;
  // What a chunk keeps there may be read once its results are out.
  virtual absl::Span<const uint8_t> host_bytes() const = 0;
};

// UNIMPLEMENTED if the memory is not the host's.
inline absl::StatusOr<absl::Span<const uint8_t>> HostBytesOf(const RetainedMemory* memory) {
  auto* const bytes = dynamic_cast<const HostBytes*>(memory);
  if (bytes == nullptr) return absl::UnimplementedError("retained memory is not the host's");
  return bytes->host_bytes();
}

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_HOST_BYTES_H_
