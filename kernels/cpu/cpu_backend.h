// SPDX-License-Identifier: Apache-2.0
// Creates CPU backends, and connects the heads of several CPU backends of one process. The backends compute
// in fp32, and use OpenBLAS for matrix products. They are synchronous: a chunk is done when Submit returns.
// The functions are thread-safe.
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
  // Threads for matrix products and row loops; 0: all that the process may use.
  int threads = 0;
  int64_t workspace_bytes = int64_t{256} << 20;  // per head; limits chunk_rows()
  int64_t memory_limit_bytes = 0;                // for heads and staging together; 0: no limit
  // Memory of the system that is left to other programs: heads and staging memory that would take it are
  // refused.
  int64_t memory_reserve_bytes = int64_t{256} << 20;
  // The pool for heads in host memory (teacher_pool.h); 0: as large as the largest such head.
  int64_t teacher_pool_bytes = 0;
  Replica replica;  // which replica the heads of this backend are, in a group (kernels/group)
  // The number of backends that share the threads. Each gets an equal part, at least one thread.
  int sharers = 1;
  // The prefix of the paths of /proc and /sys, from which the available memory is read.
  std::string host_root;
};

// Creates a backend. INVALID_ARGUMENT naming the option if one is out of range.
absl::StatusOr<std::unique_ptr<Backend>> CreateCpuBackend(const CpuBackendOptions& options);

// Creates the `count` >= 1 backends of a group. They divide the threads evenly; each gets at least one. Each
// has a workspace of workspace_bytes. They count memory together, so the memory in use that one reports is
// that of all. INVALID_ARGUMENT as CreateCpuBackend. `options.replica` is ignored.
absl::StatusOr<std::vector<std::unique_ptr<Backend>>> CreateCpuMembers(const CpuBackendOptions& options,
                                                                       int count);

// Connecting the heads of several CPU backends of one process. MakeCpuReplicas connects the replicas of a
// head, by sums and copies in host memory. JoinCpuClasses connects the parts of a head that is split by
// vocabulary. A head that is split and has several copies needs both: then the replicas of each part are
// connected.

// Casts the heads to CpuHead. INVALID_ARGUMENT unless they are heads of backends made by CreateCpuMembers,
// with the same config, in the order of their replicas.
absl::StatusOr<std::vector<CpuHead*>> CpuPartsOf(absl::Span<HeadKernels* const> heads);

// Connects the replicas of a head. `heads` are as for CpuPartsOf, otherwise INVALID_ARGUMENT; they outlive
// the result. Sums are added in the order of the replicas, so the same inputs give the same bits.
absl::StatusOr<std::unique_ptr<Replicas>> MakeCpuReplicas(absl::Span<HeadKernels* const> heads);

// Connects the parts of a head that is split by vocabulary. `heads` are heads of backends made by
// CreateCpuMembers, with the same config and the split kVocabulary: all parts of the first replica in order,
// then those of the next replica. INVALID_ARGUMENT if they are not. From now on each head must be driven by a
// thread of its own.
absl::Status JoinCpuClasses(absl::Span<HeadKernels* const> heads);
// The same, but counts the time that heads[i] spends in exchanges at member i of `clocks`, which has as many
// members as there are heads.
absl::Status JoinTimedCpuClasses(absl::Span<HeadKernels* const> heads,
                                 const std::shared_ptr<MemberExchanges>& clocks);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_CPU_BACKEND_H_
