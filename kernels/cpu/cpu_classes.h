// SPDX-License-Identifier: Apache-2.0
// The parts of a head that is split by vocabulary over several CPU backends of one process.
#ifndef LOSSD_KERNELS_CPU_CPU_CLASSES_H_
#define LOSSD_KERNELS_CPU_CPU_CLASSES_H_

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/backend.h"

namespace lossd::kernels {

// `heads`: of backends made by CreateCpuMembers, with the same config, whose split is kVocabulary, in the
// order of their parts; each is driven by a thread of its own from now on. INVALID_ARGUMENT if they are not.
absl::Status JoinCpuClasses(absl::Span<HeadKernels* const> heads);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_CPU_CLASSES_H_
