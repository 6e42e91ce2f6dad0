// SPDX-License-Identifier: Apache-2.0
// MakeRankBackend: the backend of one rank of a group, for tests.
//
// Environment variables for all ranks:
//   LOSSD_RANK_BACKEND      cpu (default) or cuda
//   LOSSD_RANK_COLLECTIVES  auto (default), nccl or gloo. With gloo, ranks may share a GPU
#ifndef LOSSD_TESTS_SERVER_RANKS_RANK_BACKEND_H_
#define LOSSD_TESTS_SERVER_RANKS_RANK_BACKEND_H_

#include <cstdint>
#include <cstdlib>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/create_backend.h"

namespace lossd::ranks::testing {

inline std::string FromEnvironment(const char* name, const char* otherwise) {
  const char* const value = std::getenv(name);
  return value == nullptr ? otherwise : value;
}

inline std::string RankBackend() { return FromEnvironment("LOSSD_RANK_BACKEND", "cpu"); }

struct RankSpec {
  int rank = 0;
  int ranks = 2;
  int64_t workspace_bytes = 0;
  // Only on GPUs: how chunks are computed, even if another way is faster: "unfused" or "fused", and after a
  // "+" "blocks" or "host_branches" (CudaBackendOptions). Empty: as a server chooses.
  std::string way;
};

inline kernels::BackendChoice ChoiceOf(const RankSpec& spec) {
  kernels::BackendChoice choice;
  choice.backend = RankBackend();
  choice.collectives = FromEnvironment("LOSSD_RANK_COLLECTIVES", "auto");
  choice.threads = 2;
  choice.local_rank = spec.rank;
  choice.workspace_bytes = spec.workspace_bytes;
  choice.replica = {spec.rank, spec.ranks};
  choice.link_host = "127.0.0.1";
  return choice;
}

// How many GPUs this process sees; 0 in a build without CUDA.
int VisibleGpus();

// Creates the backend. If `spec` names a way, it uses GPU `rank` modulo the number of GPUs.
absl::StatusOr<kernels::CreatedBackend> MakeRankBackend(const RankSpec& spec);

}  // namespace lossd::ranks::testing

#endif  // LOSSD_TESTS_SERVER_RANKS_RANK_BACKEND_H_
