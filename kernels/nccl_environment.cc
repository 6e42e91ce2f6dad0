// SPDX-License-Identifier: Apache-2.0
#include "kernels/nccl_environment.h"

#include <cstdlib>

namespace lossd::kernels {

void SetNcclDefaults() {
  if (std::getenv(kNcclMulticast) == nullptr) setenv(kNcclMulticast, "0", /*overwrite=*/0);
}

std::string NcclMulticast() {
  const char* const value = std::getenv(kNcclMulticast);
  return value == nullptr ? "" : value;
}

}  // namespace lossd::kernels
