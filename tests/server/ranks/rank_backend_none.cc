// SPDX-License-Identifier: Apache-2.0
// A build without CUDA.
#include "tests/server/ranks/rank_backend.h"

namespace lossd::ranks::testing {

int VisibleGpus() { return 0; }

absl::StatusOr<kernels::CreatedBackend> MakeRankBackend(const RankSpec& spec) {
  return kernels::CreateBackend(ChoiceOf(spec));
}

}  // namespace lossd::ranks::testing
