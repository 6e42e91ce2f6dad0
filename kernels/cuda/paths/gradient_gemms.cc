// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/paths/gradient_gemms.h"

#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/kernels/hopper/gradient_gemm.h"
#include "kernels/cuda/kernels/rows.h"
#include "kernels/cuda/paths/path_choices.h"

namespace lossd::kernels::cuda {

static_assert(hopper::kGradientGemmScratchBytes <= kGemmWorkspaceBytes);

LibraryGemms::LibraryGemms(const PathContext& context)
    : context_(context), shapes_{context.sizes.padded_hidden, context.config.compute_dtype} {}

absl::Status LibraryGemms::Prepare(const ChunkJob& job) const {
  Gemms& gemms = context_.device->gemms();
  const int64_t rows = job.padded_rows(), vocab = context_.sizes.padded_vocab;
  if (job.wants_hidden_gradient) {
    LOSSD_RETURN_IF_ERROR(gemms.Prepare(shapes_.HiddenGradient(rows, vocab, job.hidden_gradient_dtype)));
  }
  return job.layout.accumulate ? gemms.Prepare(shapes_.WeightGradient(rows, vocab)) : absl::OkStatus();
}

absl::Status LibraryGemms::HiddenGradient(const ChunkJob& job, const StoredGradient& gradient) const {
  Device& device = *context_.device;
  const DType dtype = job.hidden_gradient_dtype;
  const bool scaled = gradient.factors != nullptr;
  void* const dx = context_.memory[Region::kHiddenGradient];
  LOSSD_RETURN_IF_ERROR(
      device.gemms().Run(shapes_.HiddenGradient(job.padded_rows(), context_.sizes.padded_vocab, dtype),
                         {.a = context_.weight,
                          .b = gradient.elements,
                          .c = dx,
                          .alpha = scaled ? 1.0f : job.hidden_gradient_scale},
                         device.gemm_workspace(), device.compute()));
  if (!scaled) return absl::OkStatus();
  const int64_t ld = context_.sizes.padded_hidden;
  return ToStatus(LaunchScaleRows({dx, dtype, ld, ld}, gradient.factors, job.hidden_gradient_scale, nullptr,
                                  job.rows(), device.compute()),
                  "scale kernel");
}

absl::Status LibraryGemms::WeightGradient(const ChunkJob& job, const void* elements) const {
  Device& device = *context_.device;
  const WeightAccumulators& to = *context_.accumulators;
  return device.gemms().Run(shapes_.WeightGradient(job.padded_rows(), context_.sizes.padded_vocab),
                            {.a = job.hidden,
                             .b = elements,
                             .c = to.weight,
                             .alpha = job.weight_gradient_scale,
                             .beta = to.weight_is_zero ? 0.0f : 1.0f},
                            device.gemm_workspace(), device.compute());
}

absl::Status LibraryGemms::Describe(std::vector<Choice>& choices) const {
  Gemms& gemms = context_.device->gemms();
  const HeadSizes& sizes = context_.sizes;
  LOSSD_RETURN_IF_ERROR(DescribeGemm(
      gemms, "hidden gradient product",
      shapes_.HiddenGradient(sizes.chunk_rows, sizes.padded_vocab, context_.config.compute_dtype), choices));
  if (!context_.config.trainable) return absl::OkStatus();
  return DescribeGemm(gemms, "weight gradient product",
                      shapes_.WeightGradient(sizes.chunk_rows, sizes.padded_vocab), choices);
}

absl::Status OwnGemms::HiddenGradient(const ChunkJob& job, const StoredGradient& gradient) const {
  return Run({.a = gradient.elements,
              .b = context_.weight,
              .c = context_.memory[Region::kHiddenGradient],
              .output = job.hidden_gradient_dtype,
              .rows = job.rows(),
              .inner = context_.sizes.padded_vocab,
              .scale = job.hidden_gradient_scale,
              .factors = gradient.factors});
}

absl::Status OwnGemms::WeightGradient(const ChunkJob& job, const void* elements) const {
  return Run({.transpose_a = true,
              .a = elements,
              .b = job.hidden,
              .c = context_.accumulators->weight,
              .output = DType::kFloat32,
              .add = !context_.accumulators->weight_is_zero,
              .rows = context_.sizes.padded_vocab,
              .inner = job.rows(),
              .scale = job.weight_gradient_scale});
}

// Fills in what is the same for both.
absl::Status OwnGemms::Run(hopper::GradientGemmParams product) const {
  Device& device = *context_.device;
  product.input = context_.config.compute_dtype;
  product.columns = context_.sizes.padded_hidden;
  product.scratch = device.gemm_workspace();
  product.order = &device.limits().cluster_order;
  const hopper::GradientGemmPlan plan =
      hopper::PlanGradientGemm(product.rows, product.columns, product.inner, device.limits().fused_clusters);
  return ToStatus(hopper::LaunchGradientGemm(product, plan, device.compute()), "product kernel");
}

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
