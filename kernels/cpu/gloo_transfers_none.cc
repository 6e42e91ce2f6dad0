// SPDX-License-Identifier: Apache-2.0
// Replaces gloo_transfers.cc in a build without Gloo. The file is shorter than 60 lines because its functions
// only refuse.
#include "kernels/cpu/gloo_link.h"

namespace lossd::kernels {

bool HaveGloo() { return false; }

absl::StatusOr<std::unique_ptr<HostTransfers>> CreateGlooTransfers(Replica, const std::string&,
                                                                   absl::Duration) {
  return absl::UnavailableError(
      "several processes that exchange through the memory of their hosts need Gloo, and this program was "
      "built "
      "without it (libgloo-dev)");
}

}  // namespace lossd::kernels
