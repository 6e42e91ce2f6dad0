// SPDX-License-Identifier: Apache-2.0
// What NCCL reads from the environment of the process when it is loaded.
#ifndef LOSSD_KERNELS_NCCL_ENVIRONMENT_H_
#define LOSSD_KERNELS_NCCL_ENVIRONMENT_H_

#include <string>

namespace lossd::kernels {

// NVLink multicast (NVLS): sums that the switch between the GPUs forms.
inline constexpr char kNcclMulticast[] = "NCCL_NVLS_ENABLE";

// Keeps NVLink multicast off, unless the environment says what it is to be: NCCL then exchanges the same way
// on hosts whose driver, fabric or container offers multicast and on those that do not. To be called before
// NCCL is loaded and before the process has other threads, which may read the environment; called again it
// changes nothing.
void SetNcclDefaults();

// What the environment says of NVLink multicast; empty if nothing. Threads as above.
std::string NcclMulticast();

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_NCCL_ENVIRONMENT_H_
