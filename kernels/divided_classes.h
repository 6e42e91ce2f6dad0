// SPDX-License-Identifier: Apache-2.0
// What a head of which several devices have some of the classes each offers besides HeadKernels: its classes
// can be divided by other shares while it lives.
#ifndef LOSSD_KERNELS_DIVIDED_CLASSES_H_
#define LOSSD_KERNELS_DIVIDED_CLASSES_H_

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kernels/backend.h"

namespace lossd::kernels {

// Driven as HeadKernels.
class DividedClasses {
 public:
  // Says whether the head may become so: `divided` has the config, the rows and the memory that it would
  // have.
  using Accept = absl::FunctionRef<absl::Status(const HeadKernels& divided)>;

  virtual ~DividedClasses() = default;
  // HeadConfig::shares become these. Values and optimizer state keep every bit; gradients are zero before and
  // after, and the caller sees to it that nothing has accumulated. The head's config(), chunk_rows(),
  // slice_rows(), memory() and Describe() may change. The devices have both divisions while tensors are
  // copied, a few MiB at a time through memory of the host. After an error the head is as it was:
  // INVALID_ARGUMENT (shares), RESOURCE_EXHAUSTED (no room for both divisions), what `accept` returns,
  // UNAVAILABLE.
  virtual absl::Status SetShares(const std::vector<int32_t>& shares, Accept accept) = 0;
};

// Of any head. FAILED_PRECONDITION if its classes are not divided among devices, or if it has replicas.
inline absl::Status SetShares(HeadKernels& head, const std::vector<int32_t>& shares,
                              DividedClasses::Accept accept) {
  auto* const divided = dynamic_cast<DividedClasses*>(&head);
  if (divided != nullptr) return divided->SetShares(shares, accept);
  return absl::FailedPreconditionError(
      "the head is not split by vocabulary over several devices, or has replicas (nothing changed)");
}

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_DIVIDED_CLASSES_H_
