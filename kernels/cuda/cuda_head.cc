#include "kernels/cuda/cuda_head.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/cuda_retained.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/row_norm.h"
#include "kernels/cuda/rows.h"
#include "kernels/cuda/tensor_ops.h"
#include "kernels/validation.h"

namespace lossd::kernels::cuda {
namespace {

absl::Status Copy(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
  return ToStatus(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream),
                  "cudaMemcpyAsync");
}

absl::Status Record(const Event& event, cudaStream_t stream) {
  return ToStatus(cudaEventRecord(event.get(), stream), "cudaEventRecord");
}

absl::Status Await(const Event& event, cudaStream_t stream) {
  return ToStatus(cudaStreamWaitEvent(stream, event.get(), 0), "cudaStreamWaitEvent");
}

// Assigns a StatusOr's value or returns its status from the caller.
template <typename T>
absl::Status Take(absl::StatusOr<T> from, T& to) {
  if (!from.ok()) return from.status();
  to = *std::move(from);
  return absl::OkStatus();
}

}  // namespace

struct CudaHead::Job {
  Chunk* chunk = nullptr;
  int slot_index = 0;
  Slot* slot = nullptr;  // null: nothing to do on the device
  SlotMemory memory;
  ChunkLayout layout;
  bool hidden_gemm = false;  // dx is wanted, or needed for the norm's parameters
  bool direct = false;       // dx leaves the GEMM as the client gets it
};

CudaHead::CudaHead(Device* device, const HeadConfig& config) : device_(device), config_(config) {
  sizes_ = SizesFor(config, device->options().workspace_bytes, device->options().max_chunk_rows,
                    device->limits().multiprocessors);
  plan_ = PlanMemory(config, sizes_, device->limits().multiprocessors);
  class_weight_sum_ = static_cast<float>(config.vocab_size);
}

CudaHead::~CudaHead() { cudaSetDevice(device_->options().device); }

absl::StatusOr<std::unique_ptr<HeadKernels>> CudaHead::Create(Device* device, const HeadConfig& config) {
  std::unique_ptr<CudaHead> head(new CudaHead(device, config));
  LOSSD_RETURN_IF_ERROR(head->Allocate());
  if (device->options().autotune && !device->options().deterministic) LOSSD_RETURN_IF_ERROR(head->Tune());
  return std::unique_ptr<HeadKernels>(std::move(head));
}

absl::Status CudaHead::Allocate() {
  MemoryLedger* ledger = &device_->ledger();
  const int sms = device_->limits().multiprocessors;
  const int64_t block = ParamBlock::Carve(config_, sizes_, nullptr).bytes;
  const int64_t value_bytes = ValueBuffer::Carve(config_, sizes_, nullptr).bytes;
  const int64_t workspace_bytes = Workspace::Carve(config_, sizes_, sms, nullptr).bytes;
  LOSSD_RETURN_IF_ERROR(
      Take(DeviceBuffer::Allocate(ledger, MemoryKind::kWeights, value_bytes), value_buffer_));
  LOSSD_RETURN_IF_ERROR(
      Take(DeviceBuffer::Allocate(ledger, MemoryKind::kGradients, config_.trainable ? block : 0),
           gradient_buffer_));
  LOSSD_RETURN_IF_ERROR(
      Take(DeviceBuffer::Allocate(ledger, MemoryKind::kOptimizer, MomentCount(config_) * block),
           optimizer_buffer_));
  LOSSD_RETURN_IF_ERROR(
      Take(DeviceBuffer::Allocate(ledger, MemoryKind::kWorkspace, workspace_bytes), workspace_buffer_));
  values_ = ValueBuffer::Carve(config_, sizes_, value_buffer_.data());
  workspace_ = Workspace::Carve(config_, sizes_, sms, workspace_buffer_.data());
  if (config_.trainable) gradients_ = ParamBlock::Carve(config_, sizes_, gradient_buffer_.data());
  for (int i = 0; i < MomentCount(config_); ++i) {
    moments_[i] = ParamBlock::Carve(config_, sizes_, optimizer_buffer_.data() + i * block);
  }
  for (int i = 0; i < kChunkSlots; ++i) {
    Slot& slot = slots_[i];
    LOSSD_RETURN_IF_ERROR(
        Take(PinnedBuffer::Allocate(ledger, InputBlockBytes(sizes_.chunk_rows)), slot.host_inputs));
    LOSSD_RETURN_IF_ERROR(
        Take(PinnedBuffer::Allocate(ledger, OutputBlockBytes(sizes_.chunk_rows)), slot.host_outputs));
    Carver host_in(slot.host_inputs.data()), host_out(slot.host_outputs.data());
    Carver device_in(workspace_.slots[i].inputs), device_out(workspace_.slots[i].outputs);
    slot.host_in = RowInputBlock::Carve(host_in, sizes_.chunk_rows);
    slot.host_out = RowOutputBlock::Carve(host_out, sizes_.chunk_rows);
    slot.device_in = RowInputBlock::Carve(device_in, sizes_.chunk_rows);
    slot.device_out = RowOutputBlock::Carve(device_out, sizes_.chunk_rows);
    for (Event* event :
         {&slot.uploaded, &slot.row_results, &slot.hidden_gradient, &slot.results, &slot.done}) {
      LOSSD_RETURN_IF_ERROR(Take(Event::Create(), *event));
    }
  }
  LOSSD_RETURN_IF_ERROR(Take(Event::Create(), download_idle_));
  // The buffers were zeroed on the default stream, which ours do not wait for.
  LOSSD_RETURN_IF_CUDA_ERROR(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  for (auto [values, count] :
       {std::pair{values_.params.norm_gain, sizes_.hidden}, std::pair{values_.class_weights, sizes_.vocab}}) {
    if (values != nullptr) {
      LOSSD_RETURN_IF_CUDA_ERROR(LaunchFill(values, count, 1.0f, device_->compute()), "fill kernel");
    }
  }
  return device_->Synchronize();
}

GemmShape CudaHead::LogitsShape(int64_t rows) const {
  return {.transpose_a = true,
          .m = sizes_.padded_vocab,
          .n = rows,
          .k = sizes_.padded_hidden,
          .lda = sizes_.padded_hidden,
          .ldb = sizes_.padded_hidden,
          .ldc = sizes_.padded_vocab,
          .input = config_.compute_dtype,
          .output = config_.compute_dtype};
}

GemmShape CudaHead::HiddenGradientShape(int64_t rows, DType output) const {
  return {.m = sizes_.padded_hidden,
          .n = rows,
          .k = sizes_.padded_vocab,
          .lda = sizes_.padded_hidden,
          .ldb = sizes_.padded_vocab,
          .ldc = sizes_.padded_hidden,
          .input = config_.compute_dtype,
          .output = output};
}

GemmShape CudaHead::WeightGradientShape(int64_t rows) const {
  return {.transpose_b = true,
          .m = sizes_.padded_hidden,
          .n = sizes_.padded_vocab,
          .k = rows,
          .lda = sizes_.padded_hidden,
          .ldb = sizes_.padded_vocab,
          .ldc = sizes_.padded_hidden,
          .input = config_.compute_dtype,
          .output = DType::kFloat32};
}

absl::Status CudaHead::Tune() {
  const int64_t rows = sizes_.chunk_rows;
  const cudaStream_t stream = device_->compute();
  const SlotMemory& slot = workspace_.slots[0];
  const int64_t weight_elements = sizes_.padded_vocab * sizes_.padded_hidden;
  // Products of zeros run faster than others, so the operands are filled first and zeroed afterwards.
  LOSSD_RETURN_IF_CUDA_ERROR(
      LaunchFillPattern(values_.compute_weight, config_.compute_dtype, weight_elements, stream),
      "pattern kernel");
  LOSSD_RETURN_IF_CUDA_ERROR(
      LaunchFillPattern(slot.hidden, config_.compute_dtype, rows * sizes_.padded_hidden, stream),
      "pattern kernel");
  void* scratch = device_->gemm_workspace();
  Gemms& gemms = device_->gemms();
  LOSSD_RETURN_IF_ERROR(gemms.Tune(LogitsShape(rows),
                                   {.a = values_.compute_weight, .b = slot.hidden, .c = workspace_.logits},
                                   scratch, stream));
  LOSSD_RETURN_IF_ERROR(
      gemms.Tune(HiddenGradientShape(rows, config_.compute_dtype),
                 {.a = values_.compute_weight, .b = workspace_.logits, .c = workspace_.hidden_gradient},
                 scratch, stream));
  if (config_.trainable) {
    LOSSD_RETURN_IF_ERROR(gemms.Tune(
        WeightGradientShape(rows),
        {.a = slot.hidden, .b = workspace_.logits, .c = gradients_.weight, .alpha = 1e-3f, .beta = 1.0f},
        scratch, stream));
    LOSSD_RETURN_IF_CUDA_ERROR(
        cudaMemsetAsync(gradients_.weight, 0, static_cast<size_t>(weight_elements) * sizeof(float), stream),
        "cudaMemsetAsync");
  }
  LOSSD_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(values_.compute_weight, 0,
                                             static_cast<size_t>(weight_elements * sizes_.element), stream),
                             "cudaMemsetAsync");
  return device_->Synchronize();
}

// ---- a chunk ----

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
    if (job->layout.compact_rows > 0) status = Enqueue(*job);
  }
  Report(std::move(job), std::move(status), std::move(callbacks));
}

absl::Status CudaHead::Enqueue(const Job& job) {
  LOSSD_RETURN_IF_ERROR(PrepareGemms(job));
  const auto phases = [&]() -> absl::Status {
    LOSSD_RETURN_IF_ERROR(Upload(job));
    LOSSD_RETURN_IF_ERROR(Forward(job));
    if (job.hidden_gemm) LOSSD_RETURN_IF_ERROR(HiddenGradient(job));
    LOSSD_RETURN_IF_ERROR(Download(job));
    if (job.layout.accumulate) LOSSD_RETURN_IF_ERROR(WeightGradient(job));
    return Record(job.slot->done, device_->compute());
  };
  absl::Status status = phases();
  return status.ok() ? status : device_->Fail(std::move(status));
}

absl::Status CudaHead::PrepareGemms(const Job& job) {
  Gemms& gemms = device_->gemms();
  const int64_t rows = job.layout.padded_rows;
  LOSSD_RETURN_IF_ERROR(gemms.Prepare(LogitsShape(rows)));
  if (job.hidden_gemm)
    LOSSD_RETURN_IF_ERROR(gemms.Prepare(HiddenGradientShape(rows, HiddenGradientType(job))));
  if (job.layout.accumulate) LOSSD_RETURN_IF_ERROR(gemms.Prepare(WeightGradientShape(rows)));
  return absl::OkStatus();
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
                          stream),
        "norm forward kernel");
  }
  LOSSD_RETURN_IF_ERROR(
      device_->gemms().Run(LogitsShape(layout.padded_rows),
                           {.a = values_.compute_weight, .b = job.memory.hidden, .c = workspace_.logits},
                           device_->gemm_workspace(), stream));

  const RowInputBlock& in = job.slot->device_in;
  const RowOutputBlock& out = job.slot->device_out;
  const LossOptions& options = job.chunk->options;
  RowLossParams p;
  p.logits = workspace_.logits;
  p.dtype = compute;
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
  if (workspace_.target_dots != nullptr) {
    LOSSD_RETURN_IF_CUDA_ERROR(
        LaunchTargetDots({job.memory.hidden, values_.compute_weight, compute, sizes_.padded_hidden,
                          layout.compact_rows, in.target, workspace_.target_dots},
                         stream),
        "target kernel");
    p.target_dots = workspace_.target_dots;
  }
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
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchRowLoss(p, device_->limits(), stream), "row loss kernel");
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchGuard({layout.device_slices, in.slice_begin, in.accumulate, out.loss,
                                          out.lse, out.first_bad, workspace_.keep},
                                         stream),
                             "guard kernel");
  return Record(job.slot->row_results, stream);
}

float CudaHead::HiddenGradientScale(const Job& job) const {
  const float t = job.chunk->options.logit_scale;
  return job.direct ? t * job.layout.unit : t;
}

DType CudaHead::HiddenGradientType(const Job& job) const {
  return job.direct ? config_.compute_dtype : HiddenGradientDType(config_.compute_dtype);
}

absl::Status CudaHead::HiddenGradient(const Job& job) {
  const cudaStream_t stream = device_->compute();
  LOSSD_RETURN_IF_ERROR(Await(download_idle_, stream));
  LOSSD_RETURN_IF_ERROR(
      device_->gemms().Run(HiddenGradientShape(job.layout.padded_rows, HiddenGradientType(job)),
                           {.a = values_.compute_weight,
                            .b = workspace_.logits,
                            .c = workspace_.hidden_gradient,
                            .alpha = HiddenGradientScale(job)},
                           device_->gemm_workspace(), stream));
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
                         b, device_->limits().multiprocessors, stream),
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
  const cudaStream_t stream = device_->compute();
  const float scale = job.layout.unit * job.chunk->options.logit_scale;
  const DeviceMatrix hidden = {job.memory.hidden, config_.compute_dtype, sizes_.padded_hidden,
                               sizes_.padded_hidden};
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchZeroDroppedRows(hidden, workspace_.keep, job.layout.compact_rows, stream),
                             "zero kernel");
  if (gradients_.bias != nullptr) {
    const DeviceMatrix logits = {workspace_.logits, config_.compute_dtype, sizes_.vocab, sizes_.padded_vocab};
    LOSSD_RETURN_IF_CUDA_ERROR(LaunchColumnSum(logits, workspace_.keep, job.layout.compact_rows, scale,
                                               workspace_.partials, gradients_.bias, stream),
                               "column sum kernel");
  }
  const float beta = weight_gradient_is_zero_ ? 0.0f : 1.0f;
  weight_gradient_is_zero_ = false;
  return device_->gemms().Run(
      WeightGradientShape(job.layout.padded_rows),
      {.a = job.memory.hidden, .b = workspace_.logits, .c = gradients_.weight, .alpha = scale, .beta = beta},
      device_->gemm_workspace(), stream);
}

void CudaHead::Report(std::shared_ptr<Job> job, absl::Status status, ChunkCallbacks callbacks) {
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

// ---- tensors ----

DeviceMatrix CudaHead::FindTensor(TensorId id, int64_t row_begin) const {
  const ParamBlock* block = &values_.params;
  if (id.role == Role::kGradient) block = &gradients_;
  if (id.role == Role::kMoment1) block = &moments_[0];
  if (id.role == Role::kMoment2) block = &moments_[1];
  switch (id.param) {
    case Param::kWeight:
      return DeviceMatrix{block->weight + row_begin * sizes_.padded_hidden, DType::kFloat32, sizes_.hidden,
                          sizes_.padded_hidden};
    case Param::kBias:
      return DeviceMatrix{block->bias + row_begin, DType::kFloat32, 1, 1};
    case Param::kNormGain:
      return DeviceMatrix{block->norm_gain + row_begin, DType::kFloat32, 1, 1};
    case Param::kNormShift:
      return DeviceMatrix{block->norm_shift + row_begin, DType::kFloat32, 1, 1};
    case Param::kClassWeights:
      return DeviceMatrix{values_.class_weights + row_begin, DType::kFloat32, 1, 1};
  }
  return {};
}

// Each piece ends before the next begins: host memory need not be pinned, and the buffer is shared.
absl::Status CudaHead::ForEachPiece(const DeviceMatrix& tensor, int64_t rows, DType dtype,
                                    absl::FunctionRef<absl::Status(const Piece&)> step) {
  const int64_t row_bytes = tensor.cols * static_cast<int64_t>(SizeOf(dtype));
  const int64_t piece_rows = sizes_.piece_bytes / row_bytes;
  Piece piece;
  piece.tensor = tensor;
  piece.buffer = {workspace_.upload_piece, dtype, tensor.cols, tensor.cols};
  for (int64_t row = 0; row < rows; row += piece_rows) {
    piece.tensor.data = static_cast<float*>(tensor.data) + row * tensor.ld;
    piece.rows = std::min(piece_rows, rows - row);
    piece.offset = row * row_bytes;
    piece.bytes = piece.rows * row_bytes;
    LOSSD_RETURN_IF_ERROR(step(piece));
    LOSSD_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(device_->compute()), "cudaStreamSynchronize");
  }
  return absl::OkStatus();
}

absl::Status CudaHead::ReadTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                                  absl::Span<uint8_t> out) {
  LOSSD_RETURN_IF_ERROR(device_->Enter());
  LOSSD_RETURN_IF_ERROR(ValidateTensorAccess(config_, id, row_begin, rows, dtype, out.size()));
  LOSSD_RETURN_IF_ERROR(device_->Synchronize());
  const cudaStream_t stream = device_->compute();
  const auto read = [&](const Piece& piece) {
    LOSSD_RETURN_IF_CUDA_ERROR(LaunchConvert(piece.tensor, piece.buffer, piece.rows, stream),
                               "convert kernel");
    return Copy(out.data() + piece.offset, piece.buffer.data, piece.bytes, stream);
  };
  return device_->Fail(ForEachPiece(FindTensor(id, row_begin), rows, dtype, read));
}

absl::Status CudaHead::WriteTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                                   absl::Span<const uint8_t> in) {
  LOSSD_RETURN_IF_ERROR(device_->Enter());
  LOSSD_RETURN_IF_ERROR(ValidateTensorAccess(config_, id, row_begin, rows, dtype, in.size()));
  LOSSD_RETURN_IF_ERROR(device_->Synchronize());
  const cudaStream_t stream = device_->compute();
  const auto write = [&](const Piece& piece) {
    LOSSD_RETURN_IF_ERROR(Copy(piece.buffer.data, in.data() + piece.offset, piece.bytes, stream));
    return ToStatus(LaunchConvert(piece.buffer, piece.tensor, piece.rows, stream), "convert kernel");
  };
  LOSSD_RETURN_IF_ERROR(device_->Fail(ForEachPiece(FindTensor(id, row_begin), rows, dtype, write)));
  return device_->Fail(RefreshAfterWrite(id, row_begin, rows));
}

absl::Status CudaHead::AddGradient(Param param, int64_t row_begin, int64_t rows, DType dtype, float scale,
                                   absl::Span<const uint8_t> in) {
  const TensorId id{param, Role::kGradient};
  LOSSD_RETURN_IF_ERROR(device_->Enter());
  LOSSD_RETURN_IF_ERROR(ValidateTensorAccess(config_, id, row_begin, rows, dtype, in.size()));
  LOSSD_RETURN_IF_ERROR(device_->Synchronize());
  const cudaStream_t stream = device_->compute();
  if (param == Param::kWeight) weight_gradient_is_zero_ = false;
  const auto add = [&](const Piece& piece) {
    LOSSD_RETURN_IF_ERROR(Copy(piece.buffer.data, in.data() + piece.offset, piece.bytes, stream));
    return ToStatus(LaunchAddScaled(piece.buffer, piece.tensor, piece.rows, scale, stream), "add kernel");
  };
  return device_->Fail(ForEachPiece(FindTensor(id, row_begin), rows, dtype, add));
}

absl::Status CudaHead::RefreshAfterWrite(TensorId id, int64_t row_begin, int64_t rows) {
  if (id == TensorId{Param::kWeight, Role::kGradient}) weight_gradient_is_zero_ = false;
  if (id.param == Param::kClassWeights) return ReadClassWeights();
  if (id != TensorId{Param::kWeight, Role::kValue} || config_.compute_dtype == DType::kFloat32) {
    return absl::OkStatus();
  }
  const int64_t first = row_begin * sizes_.padded_hidden;
  const DeviceMatrix from = {values_.params.weight + first, DType::kFloat32, sizes_.padded_hidden,
                             sizes_.padded_hidden};
  const DeviceMatrix to = {static_cast<uint8_t*>(values_.compute_weight) + first * sizes_.element,
                           config_.compute_dtype, sizes_.padded_hidden, sizes_.padded_hidden};
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchConvert(from, to, rows, device_->compute()), "convert kernel");
  return device_->Synchronize();
}

absl::Status CudaHead::ReadClassWeights() {
  std::vector<float> weights(static_cast<size_t>(sizes_.vocab));
  LOSSD_RETURN_IF_CUDA_ERROR(
      cudaMemcpy(weights.data(), values_.class_weights, weights.size() * sizeof(float), cudaMemcpyDefault),
      "cudaMemcpy");
  double sum = 0.0;
  largest_class_weight_ = 0.0f;
  for (float u : weights) {
    sum += static_cast<double>(u);
    if (std::isfinite(u)) largest_class_weight_ = std::max(largest_class_weight_, std::fabs(u));
  }
  class_weight_sum_ = static_cast<float>(sum);
  return absl::OkStatus();
}

absl::StatusOr<double> CudaHead::GradNorm() {
  LOSSD_RETURN_IF_ERROR(device_->Enter());
  if (!config_.trainable) return absl::FailedPreconditionError("the head is not trainable");
  const cudaStream_t stream = device_->compute();
  double* result = workspace_.square_sums + kSquareSumPartials;
  double sum = 0.0;
  const auto compute = [&]() -> absl::Status {
    LOSSD_RETURN_IF_CUDA_ERROR(
        LaunchSquareSum(gradients_.first(), gradients_.floats(), workspace_.square_sums, result, stream),
        "square sum kernel");
    LOSSD_RETURN_IF_ERROR(Copy(&sum, result, sizeof(sum), stream));
    return ToStatus(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  };
  LOSSD_RETURN_IF_ERROR(device_->Fail(compute()));
  return std::sqrt(sum);
}

absl::Status CudaHead::ApplyStep(const OptimizerOptions& options, int64_t update) {
  LOSSD_RETURN_IF_ERROR(device_->Enter());
  LOSSD_RETURN_IF_ERROR(ValidateStep(config_, options, update));
  OptimizerStepParams p;
  p.options = options;
  p.update = update;
  p.count = gradients_.floats();
  p.matrix_count = sizes_.padded_vocab * sizes_.padded_hidden;
  p.values = values_.params.first();
  p.gradients = gradients_.first();
  const OptimizerState needed = RequiredState(options);
  if (needed != OptimizerState::kNone) p.moment1 = moments_[0].first();
  if (needed == OptimizerState::kAdam) p.moment2 = moments_[1].first();
  if (config_.compute_dtype != DType::kFloat32) p.compute_copy = values_.compute_weight;
  p.compute_dtype = config_.compute_dtype;
  LOSSD_RETURN_IF_ERROR(
      device_->Fail(ToStatus(LaunchOptimizerStep(p, device_->compute()), "optimizer kernel")));
  weight_gradient_is_zero_ = true;
  return device_->Synchronize();
}

absl::Status CudaHead::ZeroGradients() {
  LOSSD_RETURN_IF_ERROR(device_->Enter());
  if (!config_.trainable) return absl::FailedPreconditionError("the head is not trainable");
  const cudaError_t error =
      cudaMemsetAsync(gradients_.first(), 0, static_cast<size_t>(gradients_.bytes), device_->compute());
  LOSSD_RETURN_IF_ERROR(device_->Fail(ToStatus(error, "cudaMemsetAsync")));
  weight_gradient_is_zero_ = true;
  return device_->Synchronize();
}

}  // namespace lossd::kernels::cuda
