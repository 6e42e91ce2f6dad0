#include "kernels/cuda/paths/sampled_stored_path.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/kernels/rows.h"
#include "kernels/cuda/paths/decision_branch.h"
#include "kernels/cuda/paths/kept_entries.h"

namespace lossd::kernels::cuda {

SampledStoredPath::SampledStoredPath(const PathContext& context)
    : context_(context), fused_(context), stored_(context) {
  Carver own(context.memory[Region::kFilter]), hidden(context.memory[Region::kHiddenGradient]),
      logits(context.memory[Region::kLogits]);
  buffers_ = SampleBuffers::Carve(FilterShapeOf(context.config, context.sizes), own, hidden, logits);
}

void SampledStoredPath::Claim(const HeadConfig& config, const HeadSizes& sizes, PathClaims& claims) {
  FusedStoredPath::Claim(config, sizes, claims);
  StoredPath::Claim(config, sizes, claims);
  Carver own(nullptr), hidden(nullptr), logits(nullptr);
  SampleBuffers::Carve(FilterShapeOf(config, sizes), own, hidden, logits);
  claims.Claim(Region::kFilter, own.used());
  claims.Claim(Region::kHiddenGradient, hidden.used());
  claims.Claim(Region::kLogits, logits.used());
}

int64_t SampledStoredPath::CapacityOf(const ChunkJob& job) const {
  return SampleCapacity(FilterShapeOf(context_.config, context_.sizes), job.rows(),
                        job.options().sample_threshold);
}

SampleList SampledStoredPath::ListOf(const ChunkJob& job) const {
  return {buffers_.listed,   static_cast<int32_t>(CapacityOf(job)),
          buffers_.rows,     buffers_.counters,
          job.variance,      job.square};
}

absl::Status SampledStoredPath::Prepare(const ChunkJob& job) {
  return job.plan.fused() ? fused_.Prepare(job) : stored_.Prepare(job);
}

absl::Status SampledStoredPath::Loss(const ChunkJob& job) {
  LOSSD_RETURN_IF_ERROR(job.plan.fused() ? fused_.Loss(job) : stored_.Loss(job));
  return Sample(job);
}

absl::Status SampledStoredPath::Sample(const ChunkJob& job) const {
  const cudaStream_t stream = context_.device->compute();
  const LossOptions& options = job.options();
  LOSSD_RETURN_IF_ERROR(Await(*context_.download_idle, stream));  // the list lies where dx does
  LOSSD_RETURN_IF_ERROR(Zero(buffers_.counters, sizeof(SampleCounters), stream));
  LOSSD_RETURN_IF_ERROR(Zero(buffers_.runs, sizeof(RunCounters), stream));
  const SampleRowsParams sample = {.elements = stored_.logits(),
                                   .factors = job.plan.fused() ? fused_.factors() : nullptr,
                                   .terms = job.terms,
                                   .in = job.in,
                                   .lse = job.out.lse,
                                   .omega = job.omega,
                                   .with_gradient = job.with_gradient,
                                   .threshold = options.sample_threshold,
                                   .list = ListOf(job)};
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchSampleRows(sample, stream), "sampling kernels");
  DecideSampledParams decide = {.list = sample.list,
                                .rows = job.rows(),
                                .threshold = options.sample_threshold,
                                .decision = job.decision,
                                .chosen_threshold = job.sample_threshold};
  if (job.plan.gradients == Gradients::kAuto) decide.max_error = options.max_gradient_error;
  return ToStatus(LaunchDecideSampled(decide, stream), "decision kernel");
}

absl::Status SampledStoredPath::Branch(const ChunkJob& job, DeviceBranch& branch,
                                       absl::FunctionRef<absl::Status()> exact,
                                       absl::FunctionRef<absl::Status()> sampled) const {
  if (job.plan.gradients != Gradients::kAuto) return sampled();
  return BranchByDecision(context_, job, branch, exact, sampled);
}

absl::Status SampledStoredPath::HiddenGradient(const ChunkJob& job) {
  LOSSD_RETURN_IF_ERROR(Await(*context_.download_idle, context_.device->compute()));
  return Branch(
      job, *job.loss_branch,
      [&] { return job.plan.fused() ? fused_.HiddenGemm(job) : stored_.HiddenGemm(job); },
      [&] { return GatherRows(job); });
}

absl::Status SampledStoredPath::WeightGradient(const ChunkJob& job) {
  const int64_t ld = context_.sizes.padded_hidden;
  const DeviceMatrix hidden = {job.hidden, context_.config.compute_dtype, ld, ld};
  LOSSD_RETURN_IF_CUDA_ERROR(
      LaunchZeroDroppedRows(hidden, context_.keep, job.rows(), context_.device->compute()),
      "kernel over hidden states");
  LOSSD_RETURN_IF_ERROR(Branch(
      job, *job.weight_branch,
      [&] { return job.plan.fused() ? fused_.WeightGemm(job) : stored_.WeightGemm(job); },
      [&] { return AddKept(job); }));
  context_.accumulators->weight_is_zero = false;
  return absl::OkStatus();
}

absl::Status SampledStoredPath::GatherRows(const ChunkJob& job) const {
  const cudaStream_t stream = context_.device->compute();
  SampledHiddenParams p;
  p.list = ListOf(job);
  LOSSD_RETURN_IF_CUDA_ERROR(
      cudaMemcpyAsync(buffers_.entries, buffers_.listed,
                      static_cast<size_t>(CapacityOf(job)) * sizeof(SampleEntry), cudaMemcpyDeviceToDevice,
                      stream),
      "cudaMemcpyAsync");
  p.list.entries = buffers_.entries;
  p.terms = job.terms;
  p.in = job.in;
  p.dtype = context_.config.compute_dtype;
  p.weight = context_.weight;
  p.ld = context_.sizes.padded_hidden;
  if (job.wants_hidden_gradient) {
    p.hidden_gradient = context_.memory[Region::kHiddenGradient];
    p.gradient_dtype = job.hidden_gradient_dtype;
    p.gradient_scale = job.hidden_gradient_scale;
    if (job.plan.uniform_apart) {
      LOSSD_RETURN_IF_ERROR(SumWeights(context_, job, buffers_.kept));
      p.weight_sum = buffers_.kept.weight_sum;
    }
  }
  if (job.layout.accumulate) {
    LOSSD_RETURN_IF_ERROR(ClearEntries(context_, buffers_.kept, CapacityOf(job)));
    p.accumulate = job.accumulate;
    p.kept = {buffers_.kept.keys, buffers_.kept.coefs, nullptr, RowBits(job.rows()), 0};
  }
  return ToStatus(LaunchSampledHidden(p, stream), "sampled gradient kernel");
}

absl::Status SampledStoredPath::AddKept(const ChunkJob& job) const {
  if (!job.wants_hidden_gradient) LOSSD_RETURN_IF_ERROR(GatherRows(job));
  LOSSD_RETURN_IF_ERROR(AddEntries(context_, job, buffers_.kept, CapacityOf(job), buffers_.runs));
  return job.plan.uniform_apart ? AddUniform(context_, job, buffers_.kept) : absl::OkStatus();
}

absl::StatusOr<std::vector<Choice>> SampledStoredPath::Describe(const ChunkPlan& plan) {
  return plan.fused() ? fused_.Describe(plan) : stored_.Describe(plan);
}

std::vector<Choice> SampledStoredPath::DescribeRoom(const ChunkPlan& plan) const {
  const FilterShape shape = FilterShapeOf(context_.config, context_.sizes);
  Carver own(nullptr), hidden(nullptr), logits(nullptr);
  SampleBuffers::Carve(shape, own, hidden, logits);
  const absl::string_view reason = WhyNotFilteredOnDevice(shape, context_.device->limits());
  return {{.what = "sampled gradients",
           .choice = reason.empty() ? absl::StrCat("up to ", kMostPooledSamples, " classes a row on average")
                                    : "never",
           .reason = std::string(reason),
           .workspace_bytes = own.used()}};
}

}  // namespace lossd::kernels::cuda
