// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/paths/sampled_rows.h"

#include "kernels/cuda/device/cuda_status.h"

namespace lossd::kernels::cuda {

absl::Status DecideSampled(const PathContext& context, const ChunkJob& job, SampleCounters* counters) {
  const LossOptions& options = job.options();
  DecideSampledParams p = {.rows = job.rows(),
                           .threshold = options.sample_threshold,
                           .decision = job.decision,
                           .chosen_threshold = job.sample_threshold};
  p.list = {.counters = counters, .variance = job.variance, .square = job.square};
  if (job.plan.gradients == Gradients::kAuto) p.max_error = options.max_gradient_error;
  return ToStatus(LaunchDecideSampled(p, context.device->compute()), "decision kernel");
}

SampledHiddenParams HiddenParamsOf(const PathContext& context, const ChunkJob& job, const SampleList& list,
                                   const RowInputs& in, int64_t begin) {
  SampledHiddenParams p;
  p.list = list;
  p.terms = job.terms;
  p.in = in;
  p.dtype = context.config.compute_dtype;
  p.weight = context.weight;
  p.ld = context.sizes.padded_hidden;
  if (!job.wants_hidden_gradient) return p;
  p.gradient_dtype = job.hidden_gradient_dtype;
  p.hidden_gradient =
      context.memory[Region::kHiddenGradient] + begin * p.ld * static_cast<int64_t>(SizeOf(p.gradient_dtype));
  p.gradient_scale = job.hidden_gradient_scale;
  return p;
}

}  // namespace lossd::kernels::cuda
