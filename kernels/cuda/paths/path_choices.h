// SPDX-License-Identifier: Apache-2.0
// What several paths say of themselves for people, as Choices (kernels/backend.h).
#ifndef LOSSD_KERNELS_CUDA_PATHS_PATH_CHOICES_H_
#define LOSSD_KERNELS_CUDA_PATHS_PATH_CHOICES_H_

#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/backend.h"
#include "kernels/cuda/device/gemm.h"
#include "kernels/cuda/paths/chunk_path.h"

namespace lossd::kernels::cuda {

// Adds the choice of the library's algorithm for a GEMM, which `what` names.
absl::Status DescribeGemm(Gemms& gemms, absl::string_view what, const GemmShape& shape,
                          std::vector<Choice>& choices);

// The choice of the logits product that computes the loss.
Choice FusedLogitsChoice(const DeviceLimits& limits);

// Whether chunks of the head can be filtered, and the memory that is kept for it, for people.
Choice FilterChoice(const PathContext& context);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_PATH_CHOICES_H_
