// SPDX-License-Identifier: Apache-2.0
// When the loss is fused into the first product of a chunk (fused_loss.h). Pure functions; also of programs
// without CUDA.
//
// The file is shorter than 60 lines because programs without CUDA plan with it, and fused_loss.cc needs CUDA.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_HOPPER_FUSED_CHOICE_H_
#define LOSSD_KERNELS_CUDA_KERNELS_HOPPER_FUSED_CHOICE_H_

#include <cstdint>

#include "absl/strings/string_view.h"
#include "kernels/cuda/kernels/loss_rows.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda::hopper {

// Why a loss cannot be fused, or "". exponentials: it has to leave them for its gradients; clusters as
// LogitPassClusters() says.
absl::string_view WhyNotFused(const LossTerms& terms, DType compute, bool exponentials, int clusters);
// Why a loss that can be fused is better not, or "".
absl::string_view WhyNotFaster(int64_t padded_rows, int64_t vocab);

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_KERNELS_HOPPER_FUSED_CHOICE_H_
