// SPDX-License-Identifier: Apache-2.0
// What the ways of computing chunks (head_paths.h) need of a head's memory, all in one place: a new way adds
// what it needs to path_claims.cc. Pure functions; thread-safe; also of programs without CUDA.
#ifndef LOSSD_KERNELS_CUDA_PATHS_PATH_CLAIMS_H_
#define LOSSD_KERNELS_CUDA_PATHS_PATH_CLAIMS_H_

#include "kernels/cuda/paths/head_sizes.h"
#include "kernels/cuda/paths/path_memory.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

// What all paths of such a head claim, and the rows of one that is split.
PathClaims ClaimsOf(const HeadConfig& config, const HeadSizes& sizes);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_PATH_CLAIMS_H_
