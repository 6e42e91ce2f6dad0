// SPDX-License-Identifier: Apache-2.0
// Makes CPU backends, and connects the heads of several of them. The backends compute in fp32, with OpenBLAS
// for matrix products, and are synchronous: a chunk is done when Submit returns. The functions are
// thread-safe.
#ifndef LOSSD_KERNELS_CPU_CPU_BACKEND_H_
#define LOSSD_KERNELS_CPU_CPU_BACKEND_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/cpu/cpu_head.h"
#include "kernels/exchange_times.h"
#include "kernels/replica.h"

namespace lossd::kernels {

struct CpuBackendOptions {
  int threads = 0;                               // for GEMMs and row loops; 0: all the process may use
  int64_t workspace_bytes = int64_t{256} << 20;  // per head; bounds chunk_rows()
  int64_t memory_limit_bytes = 0;                // refuse heads and staging beyond it; 0: no limit
  // Of the memory that the system can give, so much is left to others: heads and staging that would take it
  // are refused.
  int64_t memory_reserve_bytes = int64_t{256} << 20;
  int64_t teacher_pool_bytes = 0;  // for heads in host memory (teacher_pool.h); 0: as the largest of them
  Replica replica;                 // of the heads of a group (kernels/group)
  int sharers = 1;        // so many backends share the threads, and this one has its part, at least one
  std::string host_root;  // what stands before /proc and /sys, where the system says what it can give
};

// INVALID_ARGUMENT naming the option if one is out of range.
absl::StatusOr<std::unique_ptr<Backend>> CreateCpuBackend(const CpuBackendOptions& options);

// Backends for the `count` >= 1 members of a group. Each has its part of the threads, at least one and all
// the same number, and the workspace is each one's own. They count their memory together: what one of them
// says of memory in use is true of all of them. INVALID_ARGUMENT as above. `options.replica` is not read.
absl::StatusOr<std::vector<std::unique_ptr<Backend>>> CreateCpuMembers(const CpuBackendOptions& options,
                                                                       int count);

// Connects the heads of several CPU backends of one process: the replicas of a head by plain sums and copies
// of host memory (MakeCpuReplicas), and the parts of a head that is split by vocabulary (JoinCpuClasses). A
// head that is split and has several copies needs both; the replicas are then those of each part.

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

#endif  // LOSSD_KERNELS_CPU_CPU_BACKEND_H_
