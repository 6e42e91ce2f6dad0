// SPDX-License-Identifier: Apache-2.0
// Memory that somebody else has allocated, as staging memory: what a server shares with another process, for
// example. Backends that can take it are StagingAdopters besides.
#ifndef LOSSD_KERNELS_STAGING_ADOPTER_H_
#define LOSSD_KERNELS_STAGING_ADOPTER_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/backend.h"

namespace lossd::kernels {

struct AdoptOptions {
  // A descriptor by which other processes can map the same memory from its begin, the caller's: it is copied
  // if it is needed for longer. -1: there is none.
  int descriptor = -1;
  // Whether the memory counts here; not if another process counts the same pages.
  bool counted = true;
};

// Thread-safe.
class StagingAdopter {
 public:
  virtual ~StagingAdopter() = default;
  // Makes `memory`, whole pages, staging memory as fast as what AllocateStaging gives. Counted as
  // MemoryKind::kStaging, unless the options say otherwise, until the result is destroyed, which must be
  // before the memory goes and before the backend. RESOURCE_EXHAUSTED if it would pass a limit, or the
  // backend's error.
  //
  // Other processes may write to the memory at any time. So a backend reads the hidden states of a slice
  // once, and takes every decision by what it has read.
  virtual absl::StatusOr<std::unique_ptr<StagingMemory>> AdoptStaging(absl::Span<uint8_t> memory,
                                                                      const AdoptOptions& options) = 0;
};

// UNIMPLEMENTED if the backend is no StagingAdopter.
inline absl::StatusOr<std::unique_ptr<StagingMemory>> AdoptStaging(Backend* backend,
                                                                   absl::Span<uint8_t> memory,
                                                                   const AdoptOptions& options = {}) {
  auto* const adopter = dynamic_cast<StagingAdopter*>(backend);
  if (adopter == nullptr) return absl::UnimplementedError("the backend takes no memory of others");
  return adopter->AdoptStaging(memory, options);
}

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_STAGING_ADOPTER_H_
