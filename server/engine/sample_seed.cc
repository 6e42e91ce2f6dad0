// SPDX-License-Identifier: Apache-2.0
#include "server/engine/sample_seed.h"

#include "kernels/sampling.h"
#include "xxhash.h"

namespace lossd::engine {

uint64_t SampleSeed(absl::string_view head, uint64_t step, uint64_t microbatch_id) {
  // absl::Hash and std::hash differ between processes and platforms.
  uint64_t seed = XXH64(head.data(), head.size(), /*seed=*/0);
  seed = kernels::MixBits(seed + step);
  return kernels::MixBits(seed + microbatch_id);
}

}  // namespace lossd::engine
