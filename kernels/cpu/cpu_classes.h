// SPDX-License-Identifier: Apache-2.0
// The parts of a head that is split by vocabulary over several CPU backends of one process.
#ifndef LOSSD_KERNELS_CPU_CPU_CLASSES_H_
#define LOSSD_KERNELS_CPU_CPU_CLASSES_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/exchange_times.h"

namespace lossd::kernels {

// `heads`: of backends made by CreateCpuMembers, with the same config, whose split is kVocabulary, in the
// order of their parts, one replica of the head after the other; each is driven by a thread of its own from
// now on. INVALID_ARGUMENT if they are not.
absl::Status JoinCpuClasses(absl::Span<HeadKernels* const> heads);
// The same; the time of part i in exchanges is counted at member i of `clocks`, which has as many.
absl::Status JoinTimedCpuClasses(absl::Span<HeadKernels* const> heads,
                                 const std::shared_ptr<MemberExchanges>& clocks);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_CPU_CLASSES_H_
