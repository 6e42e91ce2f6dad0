// SPDX-License-Identifier: Apache-2.0
// Connects the heads of several CPU backends of one process: the replicas of a head by plain sums and copies
// of host memory (MakeCpuReplicas), and the parts of a head that is split by vocabulary (JoinCpuClasses). A
// head that is split and has several copies needs both; the replicas are then those of each part.
#ifndef LOSSD_KERNELS_CPU_CPU_REPLICAS_H_
#define LOSSD_KERNELS_CPU_CPU_REPLICAS_H_

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/cpu/cpu_head.h"
#include "kernels/exchange_times.h"

namespace lossd::kernels {

// The heads as what they are. INVALID_ARGUMENT unless they are heads of backends made by CreateCpuMembers,
// with the same config, in the order of their replicas.
absl::StatusOr<std::vector<CpuHead*>> CpuPartsOf(absl::Span<HeadKernels* const> heads);

// `heads`: of backends made by CreateCpuMembers, with the same config, in the order of their replicas; they
// outlive the result. INVALID_ARGUMENT if they are not. Sums are formed in the order of the replicas, so
// their bits depend on nothing else.
absl::StatusOr<std::unique_ptr<Replicas>> MakeCpuReplicas(absl::Span<HeadKernels* const> heads);

// Joins the parts of a head that is split by vocabulary. `heads`: of backends made by CreateCpuMembers, with
// the same config, whose split is kVocabulary, in the order of their parts, one replica of the head after the
// other; each is driven by a thread of its own from now on. INVALID_ARGUMENT if they are not.
absl::Status JoinCpuClasses(absl::Span<HeadKernels* const> heads);
// The same; the time of part i in exchanges is counted at member i of `clocks`, which has as many.
absl::Status JoinTimedCpuClasses(absl::Span<HeadKernels* const> heads,
                                 const std::shared_ptr<MemberExchanges>& clocks);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_CPU_REPLICAS_H_
