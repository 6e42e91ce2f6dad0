#include "kernels/cuda/cuda_head.h"

#include <utility>

#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/rows.h"
#include "kernels/cuda/tensor_ops.h"

namespace lossd::kernels::cuda {
namespace {

// Assigns a StatusOr's value or returns its status from the caller.
template <typename T>
absl::Status Take(absl::StatusOr<T> from, T& to) {
  if (!from.ok()) return from.status();
  to = *std::move(from);
  return absl::OkStatus();
}

}  // namespace

CudaHead::CudaHead(Device* device, const HeadConfig& config) : device_(device), config_(config) {
  sizes_ = SizesFor(config, device->options().workspace_bytes, device->options().max_chunk_rows,
                    device->limits().multiprocessors, device->limits().fused_clusters > 0);
  plan_ = PlanMemory(config, sizes_, device->limits().multiprocessors);
  class_weight_sum_ = static_cast<float>(config.vocab_size);
}

CudaHead::~CudaHead() { cudaSetDevice(device_->options().device); }

absl::StatusOr<std::unique_ptr<HeadKernels>> CudaHead::Create(Device* device, const HeadConfig& config) {
  std::unique_ptr<CudaHead> head(new CudaHead(device, config));
  LOSSD_RETURN_IF_ERROR(head->Allocate());
  const bool tune = device->options().autotune && !device->options().deterministic && !head->IsCut();
  if (tune) LOSSD_RETURN_IF_ERROR(head->Tune());
  LOSSD_RETURN_IF_ERROR(head->MakeChoices());
  return std::unique_ptr<HeadKernels>(std::move(head));
}

absl::Status CudaHead::Allocate() {
  MemoryLedger* ledger = &device_->ledger();
  const int sms = device_->limits().multiprocessors;
  const int64_t block = ParamBlock::Carve(config_, sizes_, nullptr).bytes;
  const int64_t value_bytes = ValueBuffer::Carve(config_, sizes_, nullptr).bytes;
  const Workspace workspace = Workspace::Carve(config_, sizes_, sms, nullptr, nullptr);
  LOSSD_RETURN_IF_ERROR(
      Take(DeviceBuffer::Allocate(ledger, MemoryKind::kWeights, value_bytes), value_buffer_));
  LOSSD_RETURN_IF_ERROR(
      Take(DeviceBuffer::Allocate(ledger, MemoryKind::kGradients, config_.trainable ? block : 0),
           gradient_buffer_));
  LOSSD_RETURN_IF_ERROR(
      Take(DeviceBuffer::Allocate(ledger, MemoryKind::kOptimizer, MomentCount(config_) * block),
           optimizer_buffer_));
  LOSSD_RETURN_IF_ERROR(
      Take(DeviceBuffer::Allocate(ledger, MemoryKind::kWorkspace, workspace.bytes), workspace_buffer_));
  LOSSD_RETURN_IF_ERROR(
      Take(DeviceBuffer::Allocate(ledger, MemoryKind::kSlots, workspace.slot_bytes), slot_buffer_));
  values_ = ValueBuffer::Carve(config_, sizes_, value_buffer_.data());
  workspace_ = Workspace::Carve(config_, sizes_, sms, workspace_buffer_.data(), slot_buffer_.data());
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
  for (auto [values, count] :
       {std::pair{values_.params.norm_gain, sizes_.hidden}, std::pair{values_.class_weights, sizes_.vocab}}) {
    if (values != nullptr) {
      LOSSD_RETURN_IF_CUDA_ERROR(LaunchFill(values, count, 1.0f, device_->compute()), "fill kernel");
    }
  }
  return device_->Synchronize();
}

GemmShape CudaHead::LogitsShape(int64_t rows, int64_t classes) const {
  return {.transpose_a = true,
          .m = classes,
          .n = rows,
          .k = sizes_.padded_hidden,
          .lda = sizes_.padded_hidden,
          .ldb = sizes_.padded_hidden,
          .ldc = classes,
          .input = config_.compute_dtype,
          .output = config_.compute_dtype,
          .scratch = !IsCut()};
}

GemmShape CudaHead::HiddenGradientShape(int64_t rows, int64_t classes, DType output) const {
  return {.m = sizes_.padded_hidden,
          .n = rows,
          .k = classes,
          .lda = sizes_.padded_hidden,
          .ldb = classes,
          .ldc = sizes_.padded_hidden,
          .input = config_.compute_dtype,
          .output = output,
          .scratch = !IsCut()};
}

GemmShape CudaHead::WeightGradientShape(int64_t rows, int64_t classes) const {
  return {.transpose_b = true,
          .m = sizes_.padded_hidden,
          .n = classes,
          .k = rows,
          .lda = sizes_.padded_hidden,
          .ldb = classes,
          .ldc = sizes_.padded_hidden,
          .input = config_.compute_dtype,
          .output = DType::kFloat32,
          .scratch = !IsCut()};
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

}  // namespace lossd::kernels::cuda
