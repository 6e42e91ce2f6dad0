// SPDX-License-Identifier: Apache-2.0
// The heads of CPU backends that belong together, checked. Internal to the CPU backend.
#ifndef LOSSD_KERNELS_CPU_CPU_PARTS_H_
#define LOSSD_KERNELS_CPU_CPU_PARTS_H_

#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/cpu/cpu_head.h"

namespace lossd::kernels {

// INVALID_ARGUMENT unless they are heads of backends made by CreateCpuMembers, with the same config, in the
// order of their replicas.
absl::StatusOr<std::vector<CpuHead*>> CpuPartsOf(absl::Span<HeadKernels* const> heads);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_CPU_PARTS_H_
