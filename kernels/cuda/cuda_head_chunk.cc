// A chunk on a CudaHead, phase by phase. docs/kernels has the whole picture.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/cuda_head.h"
#include "kernels/cuda/cuda_head_job.h"
#include "kernels/cuda/cuda_retained.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/hopper/fused_loss.h"
#include "kernels/cuda/norm/norm.h"
#include "kernels/cuda/rows.h"
#include "kernels/cuda/tensor_ops.h"
#include "kernels/validation.h"

namespace lossd::kernels::cuda {

void CudaHead::Submit(Chunk* chunk, ChunkCallbacks callbacks) {
  auto job = std::make_shared<Job>();
  job->chunk = chunk;
  absl::Status status = device_->Enter();
  if (status.ok() && device_->in_flight() >= Device::kMaxChunksInFlight) {
    status = absl::FailedPreconditionError(
        absl::StrCat("Submit: ", Device::kMaxChunksInFlight, " chunks are already in flight"));
  }
  const LayoutHead layout_head = {config_, config_.compute_dtype, sizes_.chunk_rows,
                                  chunk->options.use_class_weights ? largest_class_weight_ : 1.0f};
  if (status.ok()) status = ValidateChunk(config_, sizes_.chunk_rows, *chunk);
  if (status.ok()) {
    job->slot_index = next_slot_;
    job->slot = &slots_[next_slot_];
    next_slot_ = (next_slot_ + 1) % kChunkSlots;
    job->memory = workspace_.slots[job->slot_index];
    job->layout = LayOutChunk(layout_head, *chunk, job->slot->host_in);
    const bool norm_gradients = job->layout.accumulate && config_.norm != Norm::kNone;
    job->hidden_gemm = job->layout.want_hidden_gradient || norm_gradients;
    job->direct = chunk->hidden_dtype == config_.compute_dtype && config_.norm == Norm::kNone;
    job->plan = PlanJob(*job);
    job->layout.filtered = job->plan.filtered();
    chunk->choices = cuda::Describe(job->plan);
    if (job->layout.compact_rows > 0) {
      if (IsCut()) ChooseBlocks(*job);
      status = Enqueue(*job);
    }
  }
  Report(job, std::move(status), std::move(callbacks));
}

absl::Status CudaHead::Enqueue(const Job& job) {
  LOSSD_RETURN_IF_ERROR(PrepareGemms(job));
  const auto phases = [&]() -> absl::Status {
    LOSSD_RETURN_IF_ERROR(Upload(job));
    LOSSD_RETURN_IF_ERROR(Forward(job));
    if (IsCut()) LOSSD_RETURN_IF_ERROR(CutBackward(job));
    if (job.hidden_gemm) LOSSD_RETURN_IF_ERROR(HiddenGradient(job));
    LOSSD_RETURN_IF_ERROR(Download(job));
    if (job.layout.accumulate && !IsCut()) LOSSD_RETURN_IF_ERROR(WeightGradient(job));
    return Record(job.slot->done, device_->compute());
  };
  absl::Status status = phases();
  return status.ok() ? status : device_->Fail(std::move(status));
}

bool CudaHead::IsDirect(const Job& job, const SliceLayout& place) const {
  return job.direct && place.compact_rows == place.slice->rows && sizes_.hidden == sizes_.padded_hidden;
}

absl::Status CudaHead::Upload(const Job& job) {
  const cudaStream_t stream = device_->upload();
  LOSSD_RETURN_IF_ERROR(
      Copy(job.memory.inputs, job.slot->host_inputs.data(), job.slot->host_inputs.bytes(), stream));
  for (const SliceLayout& place : job.layout.slices) {
    if (place.compact_rows > 0) LOSSD_RETURN_IF_ERROR(UploadSlice(job, place));
  }
  const int64_t padding = job.layout.padded_rows - job.layout.compact_rows;
  if (padding > 0 && config_.norm == Norm::kNone) {
    const int64_t row_bytes = sizes_.padded_hidden * sizes_.element;
    uint8_t* tail = static_cast<uint8_t*>(job.memory.hidden) + job.layout.compact_rows * row_bytes;
    LOSSD_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(tail, 0, static_cast<size_t>(padding * row_bytes), stream),
                               "cudaMemsetAsync");
  }
  return Record(job.slot->uploaded, stream);
}

absl::Status CudaHead::UploadSlice(const Job& job, const SliceLayout& place) {
  const cudaStream_t stream = device_->upload();
  const DType dtype = job.chunk->hidden_dtype;
  const int64_t row_bytes = sizes_.hidden * static_cast<int64_t>(SizeOf(dtype));
  const auto* from = static_cast<const uint8_t*>(place.slice->hidden);
  const int64_t rows = place.slice->rows;
  if (place.slice->retained_offset >= 0) {
    uint8_t* const retained =
        static_cast<CudaRetained*>(job.chunk->retained)->data() + place.slice->retained_offset;
    if (from != nullptr) LOSSD_RETURN_IF_ERROR(Copy(retained, from, rows * row_bytes, stream));
    from = retained;
  }
  if (config_.norm != Norm::kNone) {
    return Copy(static_cast<uint8_t*>(job.memory.raw) + place.raw_begin * row_bytes, from, rows * row_bytes,
                stream);
  }
  auto* hidden = static_cast<uint8_t*>(job.memory.hidden);
  if (IsDirect(job, place)) {
    return Copy(hidden + place.compact_begin * row_bytes, from, rows * row_bytes, stream);
  }
  const DeviceMatrix piece = {workspace_.upload_piece, dtype, sizes_.hidden, sizes_.hidden};
  const DeviceMatrix target = {hidden, config_.compute_dtype, sizes_.hidden, sizes_.padded_hidden};
  const int64_t piece_rows = sizes_.piece_bytes / row_bytes;
  for (int64_t r = 0; r < rows; r += piece_rows) {
    const int64_t count = std::min(piece_rows, rows - r);
    LOSSD_RETURN_IF_ERROR(Copy(piece.data, from + r * row_bytes, count * row_bytes, stream));
    LOSSD_RETURN_IF_CUDA_ERROR(
        LaunchGatherRows(piece, target, job.slot->device_in.compact_of_raw + place.raw_begin + r, count,
                         stream),
        "gather kernel");
  }
  return absl::OkStatus();
}

// The norm of a job's rows; y is the compact matrix it writes (forward) or the gradient it reads.
static NormParams MakeNormParams(const HeadConfig& config, const HeadSizes& sizes, const ParamBlock& values,
                                 const Workspace& workspace, const DeviceMatrix& raw, const DeviceMatrix& y,
                                 const RowInputBlock& inputs, int64_t rows) {
  NormParams p;
  p.centred = config.norm == Norm::kLayerNorm;
  p.epsilon = config.norm_epsilon;
  p.gain = values.norm_gain;
  p.shift = values.norm_shift;
  p.rows = rows;
  p.source = inputs.raw_of_compact;
  p.x = raw;
  p.y = y;
  p.mean = workspace.mean;
  p.inverse_deviation = workspace.inverse_deviation;
  return p;
}

absl::Status CudaHead::Forward(const Job& job) {
  const cudaStream_t stream = device_->compute();
  const ChunkLayout& layout = job.layout;
  const DType compute = config_.compute_dtype;
  LOSSD_RETURN_IF_ERROR(Await(job.slot->uploaded, stream));
  if (config_.norm != Norm::kNone) {
    const int64_t row_bytes = sizes_.padded_hidden * sizes_.element;
    auto* hidden = static_cast<uint8_t*>(job.memory.hidden);
    LOSSD_RETURN_IF_CUDA_ERROR(
        cudaMemsetAsync(hidden + layout.compact_rows * row_bytes, 0,
                        static_cast<size_t>((layout.padded_rows - layout.compact_rows) * row_bytes), stream),
        "cudaMemsetAsync");
    const DeviceMatrix raw = {job.memory.raw, job.chunk->hidden_dtype, sizes_.hidden, sizes_.hidden};
    const DeviceMatrix y = {hidden, compute, sizes_.hidden, sizes_.padded_hidden};
    LOSSD_RETURN_IF_CUDA_ERROR(
        LaunchNormForward(MakeNormParams(config_, sizes_, values_.params, workspace_, raw, y,
                                         job.slot->device_in, layout.compact_rows),
                          device_->limits(), stream),
        "norm forward kernel");
  }
  if (workspace_.target_dots != nullptr) {
    LOSSD_RETURN_IF_CUDA_ERROR(
        LaunchTargetDots({job.memory.hidden, values_.compute_weight, compute, sizes_.padded_hidden,
                          layout.compact_rows, job.slot->device_in.target, workspace_.target_dots},
                         stream),
        "target kernel");
  }
  const RowLossParams p = RowLoss(job);
  LOSSD_RETURN_IF_ERROR(IsCut()            ? CutForward(job, p)
                        : job.plan.fused() ? FusedForward(job, p)
                                           : LogitsForward(job, p));
  const RowInputBlock& in = job.slot->device_in;
  const RowOutputBlock& out = job.slot->device_out;
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchGuard({layout.device_slices, in.slice_begin, in.accumulate, out.loss,
                                          out.lse, out.first_bad, workspace_.keep},
                                         stream),
                             "guard kernel");
  return Record(job.slot->row_results, stream);
}

RowLossParams CudaHead::RowLoss(const Job& job) const {
  const ChunkLayout& layout = job.layout;
  const RowInputBlock& in = job.slot->device_in;
  const RowOutputBlock& out = job.slot->device_out;
  const LossOptions& options = job.chunk->options;
  RowLossParams p;
  p.logits = workspace_.logits;
  p.dtype = config_.compute_dtype;
  p.ld = sizes_.padded_vocab;
  p.vocab = sizes_.vocab;
  p.rows = layout.compact_rows;
  p.padded_rows = layout.padded_rows;
  p.write_gradient = job.hidden_gemm || layout.accumulate;
  p.bias = values_.params.bias;
  p.class_weights = options.use_class_weights ? values_.class_weights : nullptr;
  p.class_weight_sum = options.use_class_weights ? class_weight_sum_ : static_cast<float>(sizes_.vocab);
  p.scale = options.logit_scale;
  p.softcap = options.softcap;
  p.smoothing = options.label_smoothing;
  p.z_loss = options.z_loss;
  p.want_entropy = layout.want_entropy;
  p.targets = in.target;
  p.target_dots = workspace_.target_dots;
  p.weights = in.weight;
  p.coef_loss = in.coef_loss;
  p.coef_lse = in.coef_lse;
  p.coef_entropy = in.coef_entropy;
  p.any_coef_entropy = layout.any_coef_entropy;
  p.loss = out.loss;
  p.z_loss_part = out.z_loss;
  p.lse = out.lse;
  p.entropy = out.entropy;
  p.target_logprob = out.target_logprob;
  p.argmax = out.argmax;
  return p;
}

ChunkPlan CudaHead::Plan(const LossOptions& options, const RowLossParams& loss, DType hidden) const {
  const FilterShape filter = FilterShapeOf(config_, sizes_);
  const DeviceLimits& limits = device_->limits();
  const FusedLoss fused_loss = device_->options().fused_loss;
  ChunkPlan plan = IsCut() ? PlanCutChunk(options, loss, filter, limits, fused_loss)
                           : PlanChunk(options, loss, filter, limits, fused_loss);
  if (config_.norm != Norm::kNone) PlanNorm(loss, hidden, plan);
  return plan;
}

// As the launches will, whose matrices all begin where vectors may.
void CudaHead::PlanNorm(const RowLossParams& loss, DType hidden, ChunkPlan& plan) const {
  NormParams p;
  p.rows = loss.rows;
  p.x = {nullptr, hidden, sizes_.hidden, sizes_.hidden};
  p.y = {nullptr, config_.compute_dtype, sizes_.hidden, sizes_.padded_hidden};
  plan.norm = PlanNormForward(p);
  if (!loss.write_gradient) return;
  p.y.dtype = HiddenGradientDType(config_.compute_dtype);
  plan.norm_gradient = PlanNormBackward(p, {}, device_->limits());
}

ChunkPlan CudaHead::PlanJob(const Job& job) {
  const LossOptions& options = job.chunk->options;
  std::optional<LossOptions>& trial = job.slot->trial;
  // The chunk that had the slot before has left the device.
  if (trial.has_value()) trials_.Note(*trial, *job.slot->host_out.decision);
  trial.reset();
  const RowLossParams loss = RowLoss(job);
  ChunkPlan plan = Plan(options, loss, job.chunk->hidden_dtype);
  if (!plan.filtered() || job.chunk->independent) return plan;
  if (trials_.Next(options)) {
    trial = options;
    return plan;
  }
  LossOptions exact = options;
  exact.algorithm = Algorithm::kExact;
  plan = Plan(exact, loss, job.chunk->hidden_dtype);
  plan.why_exact = "so were the chunks before it";
  return plan;
}

absl::Status CudaHead::FusedForward(const Job& job, const RowLossParams& row) {
  const cudaStream_t stream = device_->compute();
  LOSSD_RETURN_IF_ERROR(Await(download_idle_, stream));  // the partials lie where dx does
  return ToStatus(hopper::LaunchFusedLoss({.loss = row,
                                           .hidden = job.memory.hidden,
                                           .weight = values_.compute_weight,
                                           .inner = sizes_.padded_hidden,
                                           .rows = workspace_.fused,
                                           .order = &device_->limits().cluster_order},
                                          device_->limits().fused_clusters, stream),
                  "fused loss kernels");
}

absl::Status CudaHead::LogitsForward(const Job& job, const RowLossParams& row) {
  const cudaStream_t stream = device_->compute();
  LOSSD_RETURN_IF_ERROR(
      device_->gemms().Run(LogitsShape(row.padded_rows),
                           {.a = values_.compute_weight, .b = job.memory.hidden, .c = workspace_.logits},
                           device_->gemm_workspace(), stream));
  if (!job.plan.filtered()) return ToStatus(LaunchRowLoss(row, device_->limits(), stream), "row loss kernel");
  // Writing dx, the filter takes the place of the dx GEMM.
  if (job.hidden_gemm) LOSSD_RETURN_IF_ERROR(Await(download_idle_, stream));
  return FilteredForward(job, row);
}

absl::Status CudaHead::HiddenGradient(const Job& job) {
  const cudaStream_t stream = device_->compute();
  if (!job.plan.filtered() && !IsCut()) {
    LOSSD_RETURN_IF_ERROR(Await(download_idle_, stream));
    LOSSD_RETURN_IF_ERROR(HiddenProduct(job));
  }
  if (config_.norm != Norm::kNone) LOSSD_RETURN_IF_ERROR(NormBackward(job));
  return Record(job.slot->hidden_gradient, stream);
}

absl::Status CudaHead::NormBackward(const Job& job) {
  const cudaStream_t stream = device_->compute();
  const DeviceMatrix raw = {job.memory.raw, job.chunk->hidden_dtype, sizes_.hidden, sizes_.hidden};
  const DeviceMatrix dy = {workspace_.hidden_gradient, HiddenGradientType(job), sizes_.hidden,
                           sizes_.padded_hidden};
  NormBackwardParams b;
  b.scale = job.layout.unit * job.chunk->options.logit_scale / HiddenGradientScale(job);
  b.keep = workspace_.keep;
  if (job.layout.want_hidden_gradient) b.dx = raw;  // in place; the download takes it from there
  if (job.layout.accumulate) {
    b.gain_gradient = gradients_.norm_gain;
    b.shift_gradient = gradients_.norm_shift;
    b.partials = workspace_.partials;
  }
  LOSSD_RETURN_IF_CUDA_ERROR(
      LaunchNormBackward(MakeNormParams(config_, sizes_, values_.params, workspace_, raw, dy,
                                        job.slot->device_in, job.layout.compact_rows),
                         b, device_->limits(), stream),
      "norm backward kernel");
  if (!job.layout.want_hidden_gradient || job.layout.compact_rows == job.layout.raw_rows)
    return absl::OkStatus();
  return ToStatus(
      LaunchZeroUnmappedRows(raw, job.slot->device_in.compact_of_raw, job.layout.raw_rows, stream),
      "zero kernel");
}

absl::Status CudaHead::Download(const Job& job) {
  const cudaStream_t stream = device_->download();
  LOSSD_RETURN_IF_ERROR(Await(job.slot->row_results, stream));
  LOSSD_RETURN_IF_ERROR(
      Copy(job.slot->host_outputs.data(), job.memory.outputs, job.slot->host_outputs.bytes(), stream));
  if (job.layout.want_hidden_gradient) {
    LOSSD_RETURN_IF_ERROR(Await(job.slot->hidden_gradient, stream));
    for (const SliceLayout& place : job.layout.slices) {
      if (place.compact_rows == 0 || place.slice->grad_hidden == nullptr) continue;
      LOSSD_RETURN_IF_ERROR(DownloadSlice(job, place));
    }
    LOSSD_RETURN_IF_ERROR(Record(download_idle_, stream));
  }
  return Record(job.slot->results, stream);
}

absl::Status CudaHead::DownloadSlice(const Job& job, const SliceLayout& place) {
  const cudaStream_t stream = device_->download();
  const DType dtype = job.chunk->hidden_dtype;
  const int64_t row_bytes = sizes_.hidden * static_cast<int64_t>(SizeOf(dtype));
  auto* to = static_cast<uint8_t*>(place.slice->grad_hidden);
  const int64_t rows = place.slice->rows;
  if (config_.norm != Norm::kNone) {
    return Copy(to, static_cast<const uint8_t*>(job.memory.raw) + place.raw_begin * row_bytes,
                rows * row_bytes, stream);
  }
  const auto* gradient = static_cast<const uint8_t*>(workspace_.hidden_gradient);
  if (IsDirect(job, place)) {
    return Copy(to, gradient + place.compact_begin * row_bytes, rows * row_bytes, stream);
  }
  const float scale = job.layout.unit * job.chunk->options.logit_scale / HiddenGradientScale(job);
  const DeviceMatrix source = {workspace_.hidden_gradient, HiddenGradientType(job), sizes_.hidden,
                               sizes_.padded_hidden};
  const DeviceMatrix piece = {workspace_.download_piece, dtype, sizes_.hidden, sizes_.hidden};
  const int64_t piece_rows = sizes_.piece_bytes / row_bytes;
  for (int64_t r = 0; r < rows; r += piece_rows) {
    const int64_t count = std::min(piece_rows, rows - r);
    LOSSD_RETURN_IF_CUDA_ERROR(
        LaunchScatterRows(source, piece, job.slot->device_in.compact_of_raw + place.raw_begin + r, count,
                          scale, stream),
        "scatter kernel");
    LOSSD_RETURN_IF_ERROR(Copy(to + r * row_bytes, piece.data, count * row_bytes, stream));
  }
  return absl::OkStatus();
}

absl::Status CudaHead::WeightGradient(const Job& job) {
  const DeviceMatrix hidden = {job.memory.hidden, config_.compute_dtype, sizes_.padded_hidden,
                               sizes_.padded_hidden};
  const int64_t rows = job.layout.compact_rows;
  LOSSD_RETURN_IF_CUDA_ERROR(
      job.plan.fused()
          ? LaunchScaleRows(hidden, workspace_.fused.factor, 1.0f, workspace_.keep, rows, device_->compute())
          : LaunchZeroDroppedRows(hidden, workspace_.keep, rows, device_->compute()),
      "kernel over hidden states");
  LOSSD_RETURN_IF_ERROR(job.plan.filtered() ? FilteredWeightGradient(job) : WeightProduct(job));
  weight_gradient_is_zero_ = false;
  return absl::OkStatus();
}

void CudaHead::Report(const std::shared_ptr<Job>& job, absl::Status status, ChunkCallbacks callbacks) {
  const bool on_device = status.ok() && job->layout.compact_rows > 0;
  auto shared = std::make_shared<ChunkCallbacks>(std::move(callbacks));
  auto final_status = std::make_shared<absl::Status>(status);
  Device* device = device_;
  Device::Completion completion;
  completion.results = [job, on_device, shared, final_status, device, hidden = sizes_.hidden] {
    if (on_device) {
      *final_status =
          device->Fail(ToStatus(cudaEventSynchronize(job->slot->results.get()), "cudaEventSynchronize"));
    } else if (!final_status->ok() && job->slot != nullptr) {
      cudaDeviceSynchronize();  // copies to the slices' memory may be under way
    }
    if (final_status->ok()) {
      UnpackResults(*job->chunk, job->layout, hidden, job->slot->host_in, job->slot->host_out);
    }
    shared->on_results(*final_status);
  };
  completion.wait_done = [job, on_device, final_status, device] {
    if (!on_device || !final_status->ok()) return;
    *final_status =
        device->Fail(ToStatus(cudaEventSynchronize(job->slot->done.get()), "cudaEventSynchronize"));
  };
  completion.done = [shared, final_status] { shared->on_done(*final_status); };
  device_->Enqueue(std::move(completion));
}

}  // namespace lossd::kernels::cuda
