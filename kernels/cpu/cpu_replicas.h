// SPDX-License-Identifier: Apache-2.0
// The replicas of a head on several CPU backends of one process: plain sums and copies of host memory. Of
// a head that is split by vocabulary, replicas of the parts.
#ifndef LOSSD_KERNELS_CPU_CPU_REPLICAS_H_
#define LOSSD_KERNELS_CPU_CPU_REPLICAS_H_

#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/backend.h"

namespace lossd::kernels {

// `heads`: of backends made by CreateCpuMembers, with the same config, in the order of their replicas; they
// outlive the result. INVALID_ARGUMENT if they are not. Sums are formed in the order of the replicas, so
// their bits depend on nothing else.
absl::StatusOr<std::unique_ptr<Replicas>> MakeCpuReplicas(absl::Span<HeadKernels* const> heads);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_CPU_REPLICAS_H_
