// The products of a chunk on a CudaHead that follow its loss: dx and dW, by cuBLASLt or, on Hopper, by
// kernels of our own. docs/kernels has the whole picture.
#include "absl/status/status.h"
#include "kernels/cuda/cuda_head.h"
#include "kernels/cuda/cuda_head_job.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/hopper/product.h"
#include "kernels/cuda/rows.h"

namespace lossd::kernels::cuda {

static_assert(hopper::kProductScratchBytes <= kGemmWorkspaceBytes);

absl::Status CudaHead::PrepareGemms(const Job& job) {
  if (IsCut()) return PrepareCutGemms(job);
  Gemms& gemms = device_->gemms();
  const int64_t rows = job.layout.padded_rows;
  if (!job.plan.fused()) LOSSD_RETURN_IF_ERROR(gemms.Prepare(LogitsShape(rows)));
  if (job.plan.own_products()) return absl::OkStatus();
  if (job.hidden_gemm) {
    LOSSD_RETURN_IF_ERROR(gemms.Prepare(HiddenGradientShape(rows, HiddenGradientType(job))));
  }
  return job.layout.accumulate ? gemms.Prepare(WeightGradientShape(rows)) : absl::OkStatus();
}

absl::Status CudaHead::Multiply(hopper::ProductParams product) {
  product.input = config_.compute_dtype;
  product.columns = sizes_.padded_hidden;
  product.scratch = device_->gemm_workspace();
  product.order = &device_->limits().cluster_order;
  const hopper::ProductPlan plan =
      hopper::PlanProduct(product.rows, product.columns, product.inner, device_->limits().fused_clusters);
  return ToStatus(hopper::LaunchProduct(product, plan, device_->compute()), "product kernel");
}

float CudaHead::HiddenGradientScale(const Job& job) const {
  const float t = job.chunk->options.logit_scale;
  return job.direct ? t * job.layout.unit : t;
}

DType CudaHead::HiddenGradientType(const Job& job) const {
  return job.direct ? config_.compute_dtype : HiddenGradientDType(config_.compute_dtype);
}

absl::Status CudaHead::HiddenProduct(const Job& job) {
  const DType dtype = HiddenGradientType(job);
  const float* factors = job.plan.fused() ? workspace_.fused.factor : nullptr;
  if (job.plan.own_products()) {
    return Multiply({.a = workspace_.logits,
                     .b = values_.compute_weight,
                     .c = workspace_.hidden_gradient,
                     .output = dtype,
                     .rows = job.layout.compact_rows,
                     .inner = sizes_.padded_vocab,
                     .scale = HiddenGradientScale(job),
                     .factors = factors});
  }
  LOSSD_RETURN_IF_ERROR(device_->gemms().Run(HiddenGradientShape(job.layout.padded_rows, dtype),
                                             {.a = values_.compute_weight,
                                              .b = workspace_.logits,
                                              .c = workspace_.hidden_gradient,
                                              .alpha = job.plan.fused() ? 1.0f : HiddenGradientScale(job)},
                                             device_->gemm_workspace(), device_->compute()));
  if (!job.plan.fused()) return absl::OkStatus();
  const DeviceMatrix gradient = {workspace_.hidden_gradient, dtype, sizes_.padded_hidden,
                                 sizes_.padded_hidden};
  return ToStatus(LaunchScaleRows(gradient, factors, HiddenGradientScale(job), nullptr,
                                  job.layout.compact_rows, device_->compute()),
                  "scale kernel");
}

absl::Status CudaHead::WeightProduct(const Job& job) {
  const cudaStream_t stream = device_->compute();
  const float scale = job.layout.unit * job.chunk->options.logit_scale;
  if (gradients_.bias != nullptr) {
    const DeviceMatrix logits = {workspace_.logits, config_.compute_dtype, sizes_.vocab, sizes_.padded_vocab};
    const float* factors = job.plan.fused() ? workspace_.fused.factor : nullptr;
    LOSSD_RETURN_IF_CUDA_ERROR(LaunchColumnSum(logits, workspace_.keep, factors, job.layout.compact_rows,
                                               scale, workspace_.partials, gradients_.bias, stream),
                               "column sum kernel");
  }
  if (job.plan.own_products()) {
    return Multiply({.transpose_a = true,
                     .a = workspace_.logits,
                     .b = job.memory.hidden,
                     .c = gradients_.weight,
                     .output = DType::kFloat32,
                     .add = !weight_gradient_is_zero_,
                     .rows = sizes_.padded_vocab,
                     .inner = job.layout.compact_rows,
                     .scale = scale});
  }
  const float beta = weight_gradient_is_zero_ ? 0.0f : 1.0f;
  return device_->gemms().Run(
      WeightGradientShape(job.layout.padded_rows),
      {.a = job.memory.hidden, .b = workspace_.logits, .c = gradients_.weight, .alpha = scale, .beta = beta},
      device_->gemm_workspace(), stream);
}

}  // namespace lossd::kernels::cuda
