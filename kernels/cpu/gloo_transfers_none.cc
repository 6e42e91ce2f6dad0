// SPDX-License-Identifier: Apache-2.0
// A build without Gloo. The file is shorter than 60 lines because it stands in for gloo_transfers.cc and only
// refuses.
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
