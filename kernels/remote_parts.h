// SPDX-License-Identifier: Apache-2.0
// What a head of which parts lie in other processes offers besides HeadKernels: those processes can save and
// load their parts by themselves.
#ifndef LOSSD_KERNELS_REMOTE_PARTS_H_
#define LOSSD_KERNELS_REMOTE_PARTS_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/replica.h"

namespace lossd::kernels {

struct RemotePart {
  int rank = 0;                // of the process
  uint64_t head = 0;           // what the head is called there
  Replica replica;             // which part of the head it is,
  Split split = Split::kRows;  // and by what the head is divided: never kAny
};

// Driven as HeadKernels.
class RemoteParts {
 public:
  virtual ~RemoteParts() = default;
  virtual std::vector<RemotePart> remote_parts() const = 0;
  // From now on WriteTensor passes by the parts on these ranks, which get their rows in another way. Empty:
  // it writes all parts again.
  virtual void PassBy(absl::Span<const int> ranks) = 0;
};

// Those of any head.
inline std::vector<RemotePart> RemotePartsOf(HeadKernels& head) {
  const auto* const parts = dynamic_cast<const RemoteParts*>(&head);
  return parts == nullptr ? std::vector<RemotePart>() : parts->remote_parts();
}

inline void PassBy(HeadKernels& head, absl::Span<const int> ranks) {
  if (auto* const parts = dynamic_cast<RemoteParts*>(&head)) parts->PassBy(ranks);
}

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_REMOTE_PARTS_H_
