// SPDX-License-Identifier: Apache-2.0
// Retained memory that the host can read and write: where other processes compute rows whose hidden states
// are there, or are to be (docs/scaling.md). Memory of the CPU and CUDA backends is HostBytes besides.
#ifndef LOSSD_KERNELS_HOST_BYTES_H_
#define LOSSD_KERNELS_HOST_BYTES_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/backend.h"

namespace lossd::kernels {

// Thread-safe, but that bytes which are being written are not for anybody else.
class HostBytes {
 public:
  virtual ~HostBytes() = default;
  // Copies what lies at `offset`, to fill `out`. What a chunk keeps there may be read once its results are
  // out.
  virtual absl::Status ReadBytes(int64_t offset, absl::Span<uint8_t> out) const = 0;
  // Copies `in` to `offset`. Chunks that are submitted afterwards find it there.
  virtual absl::Status WriteBytes(int64_t offset, absl::Span<const uint8_t> in) = 0;
};

// UNIMPLEMENTED if the host cannot read the memory.
inline absl::Status ReadBytesOf(const RetainedMemory* memory, int64_t offset, absl::Span<uint8_t> out) {
  auto* const bytes = dynamic_cast<const HostBytes*>(memory);
  if (bytes == nullptr) return absl::UnimplementedError("the host cannot read retained memory");
  return bytes->ReadBytes(offset, out);
}

// UNIMPLEMENTED if the host cannot write it.
inline absl::Status WriteBytesOf(RetainedMemory* memory, int64_t offset, absl::Span<const uint8_t> in) {
  auto* const bytes = dynamic_cast<HostBytes*>(memory);
  if (bytes == nullptr) return absl::UnimplementedError("the host cannot write retained memory");
  return bytes->WriteBytes(offset, in);
}

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_HOST_BYTES_H_
