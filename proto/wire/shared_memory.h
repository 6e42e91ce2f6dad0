// SPDX-License-Identifier: Apache-2.0
// SharedMemory is memory that can be shared with another process: a sealed memfd, mapped into this process. A
// process that gets the descriptor can write to the memory, but cannot change its size.
#ifndef LOSSD_PROTO_WIRE_SHARED_MEMORY_H_
#define LOSSD_PROTO_WIRE_SHARED_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/wire/region_packets.h"

namespace lossd::wire {

// Thread-compatible.
class SharedMemory {
 public:
  // Creates memory of at least `bytes` > 0, in whole pages, and allocates all pages. RESOURCE_EXHAUSTED if
  // the system has too little memory.
  static absl::StatusOr<std::unique_ptr<SharedMemory>> Create(int64_t bytes);
  // Creates the memory without its pages, for callers that check limits before they allocate. Fill allocates
  // the pages; call it before anything accesses the memory.
  static absl::StatusOr<std::unique_ptr<SharedMemory>> Reserve(int64_t bytes);
  absl::Status Fill();
  // Gives the pages back to the system, even if another process still has them mapped. That process then
  // reads zeros.
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  absl::Span<uint8_t> bytes() const { return bytes_; }
  int descriptor() const { return descriptor_.get(); }

 private:
  explicit SharedMemory(OwnedDescriptor descriptor) : descriptor_(std::move(descriptor)) {}

  const OwnedDescriptor descriptor_;
  absl::Span<uint8_t> bytes_;
};

}  // namespace lossd::wire

#endif  // LOSSD_PROTO_WIRE_SHARED_MEMORY_H_
