// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/paths/stored_gradients.h"

#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/kernels/rows.h"

namespace lossd::kernels::cuda {

const GradientGemms& StoredGradients::GemmsOf(const ChunkPlan& plan) const {
  if (plan.own_gemms()) return own_;
  return library_;
}

absl::Status StoredGradients::HiddenGradient(const ChunkJob& job, const StoredGradient& gradient) const {
  return GemmsOf(job.plan).HiddenGradient(job, gradient);
}

absl::Status StoredGradients::WeightGradient(const ChunkJob& job, const StoredGradient& gradient) const {
  if (float* const bias = context_.accumulators->bias; bias != nullptr) {
    const HeadSizes& sizes = context_.sizes;
    const DeviceMatrix elements = {gradient.elements, context_.config.compute_dtype, sizes.vocab,
                                   sizes.padded_vocab};
    LOSSD_RETURN_IF_CUDA_ERROR(
        LaunchColumnSum(elements, context_.keep, gradient.factors, job.rows(), job.weight_gradient_scale,
                        context_.memory.At<float>(Region::kColumnSums), bias, context_.device->compute()),
        "column sum kernel");
  }
  return GemmsOf(job.plan).WeightGradient(job, gradient.elements);
}

}  // namespace lossd::kernels::cuda
