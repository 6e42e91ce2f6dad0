// SPDX-License-Identifier: Apache-2.0
// CudaHead (cuda_head.h). CudaHead::Enqueue shows the phases of a chunk in order. The norm, the planner of
// chunks and helpers of the phases come first.
//
// A chunk: Submit lays its rows out in a slot (Prepare), and enqueues its phases (Enqueue): uploads, norm,
// loss, guard, hidden gradient, guard, gradient of the norm, downloads, weight gradient. Report gives the
// device's completion thread what it has to do when the results have arrived. The guard finds rows that are
// not finite; its result is `keep`, which says of each row whether it may be accumulated.
#include "kernels/cuda/heads/cuda_head.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/heads/head_memory.h"
#include "kernels/cuda/kernels/row_classes.h"
#include "kernels/cuda/kernels/row_loss.h"
#include "kernels/cuda/kernels/rows.h"
#include "kernels/cuda/kernels/tensor_ops.h"
#include "kernels/cuda/paths/path_steps.h"
#include "kernels/cuda/paths/recomputed_path.h"
#include "kernels/errors/field_error.h"
#include "kernels/validation.h"

namespace lossd::kernels::cuda {

// Writes to `plan` the kernels that the launches will choose. Every matrix of a launch is aligned for vector
// accesses.
void HeadNorm::Plan(const ChunkFacts& chunk, DType hidden_dtype, ChunkPlan& plan) const {
  if (!exists()) return;
  NormParams p;
  p.rows = chunk.rows;
  p.x = {nullptr, hidden_dtype, sizes_.hidden, sizes_.hidden};
  p.y = {nullptr, config_.compute_dtype, sizes_.hidden, sizes_.padded_hidden};
  plan.norm = PlanNormForward(p);
  if (!chunk.wants_gradient) return;
  p.y.dtype = HiddenGradientDType(sizes_, config_.compute_dtype);
  plan.norm_gradient = PlanNormBackward(p, {}, device_->limits());
}

DeviceMatrix HeadNorm::RawRows(const ChunkJob& job, const ChunkSlot& slot) const {
  return {slot.memory.raw, job.chunk->hidden_dtype, sizes_.hidden, sizes_.hidden};
}

NormParams HeadNorm::ParamsOf(const ChunkJob& job, const ChunkSlot& slot, const DeviceMatrix& y) const {
  NormParams p;
  p.centred = config_.norm == Norm::kLayerNorm;
  p.epsilon = config_.norm_epsilon;
  p.gain = tensors_->values().params.norm_gain;
  p.shift = tensors_->values().params.norm_shift;
  p.rows = job.rows();
  p.source = slot.device_in.raw_of_compact;
  p.x = RawRows(job, slot);
  p.y = y;
  p.mean = workspace_.mean;
  p.inverse_deviation = workspace_.inverse_deviation;
  return p;
}

absl::Status HeadNorm::Forward(const ChunkJob& job, const ChunkSlot& slot) const {
  const cudaStream_t stream = device_->compute();
  const int64_t row_bytes = sizes_.padded_hidden * sizes_.element;
  auto* hidden = static_cast<uint8_t*>(slot.memory.hidden);
  LOSSD_RETURN_IF_ERROR(
      Zero(hidden + job.rows() * row_bytes, (job.padded_rows() - job.rows()) * row_bytes, stream));
  const DeviceMatrix y = {hidden, config_.compute_dtype, sizes_.hidden, sizes_.padded_hidden};
  return ToStatus(LaunchNormForward(ParamsOf(job, slot, y), device_->limits(), stream),
                  "norm forward kernel");
}

// The parts of a split head have different rows here. So each part first adds up the gradients of gain and
// shift over its own rows in `sums`. Then `sums` is summed over the parts, and every part adds the same sums
// to its gradients.
absl::Status HeadNorm::Backward(const ChunkJob& job, const ChunkSlot& slot) const {
  const cudaStream_t stream = device_->compute();
  const DeviceMatrix raw = RawRows(job, slot);
  const int64_t begin = job.rows_here.begin;
  const int64_t row_bytes = sizes_.padded_hidden * static_cast<int64_t>(SizeOf(job.hidden_gradient_dtype));
  const DeviceMatrix dy = {workspace_.paths[Region::kHiddenGradient] + begin * row_bytes,
                           job.hidden_gradient_dtype, sizes_.hidden, sizes_.padded_hidden};
  NormParams p = ParamsOf(job, slot, dy);
  p.rows = job.rows_here.end - begin;
  p.source += begin;
  p.mean += begin;
  p.inverse_deviation += begin;
  NormBackwardParams b;
  b.scale = job.hidden_gradient_factor();
  b.keep = workspace_.keep + begin;
  if (job.layout.want_hidden_gradient) b.dx = raw;  // in place: Download reads it there
  float* const sums = SplitRows::Carve(sizes_, workspace_.paths[Region::kSplitRows]).norm_sums;
  if (job.layout.accumulate) {
    b.gain_gradient = sizes_.is_split() ? sums : tensors_->gradients().norm_gain;
    b.shift_gradient = tensors_->gradients().norm_shift;
    if (sizes_.is_split() && b.shift_gradient != nullptr) b.shift_gradient = sums + sizes_.padded_hidden;
    b.partials = workspace_.paths.At<float>(Region::kColumnSums);
  }
  const int64_t sum_bytes = 2 * sizes_.padded_hidden * static_cast<int64_t>(sizeof(float));
  const bool exchanges = sizes_.is_split() && job.layout.accumulate;
  if (exchanges) LOSSD_RETURN_IF_ERROR(Zero(sums, sum_bytes, stream));
  if (p.rows > 0) {
    LOSSD_RETURN_IF_CUDA_ERROR(LaunchNormBackward(p, b, device_->limits(), stream), "norm backward kernel");
  }
  if (exchanges) {
    LOSSD_RETURN_IF_ERROR(
        link_->exchange->Sum(ExchangeKind::kHiddenGradients, sums, 2 * sizes_.padded_hidden));
    LOSSD_RETURN_IF_ERROR(tensors_->AddNormGradients(sums, sums + sizes_.padded_hidden));
  }
  // The raw rows without a target, and absent rows, still hold hidden states. Their gradient is 0.
  const int64_t with_gradient = job.rows() - job.layout.absent_rows;
  if (!job.layout.want_hidden_gradient || with_gradient == job.layout.raw_rows) return absl::OkStatus();
  return ToStatus(LaunchZeroUnmappedRows(raw, slot.device_in.gradient_of_raw, job.layout.raw_rows, stream),
                  "zero kernel");
}

ChunkPlanner::ChunkPlanner(const Device& device, const HeadConfig& config, const HeadSizes& sizes,
                           const HeadNorm* norm)
    : limits_{config.logits, PlannedShapeOf(config, sizes), device.limits(), device.options().fused_loss,
              sizes.is_split()},
      norm_(norm) {}

ChunkPlan ChunkPlanner::Plan(const LossOptions& options, const ChunkFacts& facts, DType hidden_dtype) const {
  ChunkPlan plan = PlanChunk(options, facts, limits_);
  norm_->Plan(facts, hidden_dtype, plan);
  return plan;
}

ChunkPlan ChunkPlanner::Next(const Chunk& chunk, const ChunkFacts& facts, ChunkSlot& slot) {
  const LossOptions& options = chunk.options;
  // The last chunk of this slot has left the device, so its decision is in host memory.
  if (slot.trial.has_value()) backoff_.Note(*slot.trial, *slot.host_out.decision);
  slot.trial.reset();
  ChunkPlan plan = Plan(options, facts, chunk.hidden_dtype);
  // An independent chunk must not depend on earlier chunks, so the back-off does not count for it.
  if (plan.exact() || chunk.independent) return plan;
  if (backoff_.Next(options)) {
    slot.trial = options;
    return plan;
  }
  LossOptions exact = options;
  exact.gradients = Gradients::kExact;
  plan = Plan(exact, facts, chunk.hidden_dtype);
  plan.why_exact = "so were the chunks before it";
  return plan;
}

namespace {

HeadSizes SizesOn(const Device& device, const HeadConfig& config) {
  return SizesFor(config, device.options().workspace_bytes, device.options().max_chunk_rows,
                  device.limits().multiprocessors, device.limits().fused_clusters > 0,
                  device.options().replica);
}

RowInputs InputsOf(const ChunkLayout& layout, const LossOptions& options, const RowInputBlock& block,
                   const float* target_dots) {
  const bool objective = options.objective.active();
  return {.rows = layout.compact_rows,
          .padded_rows = layout.padded_rows,
          .targets = block.target,
          .target_dots = target_dots,
          .weights = block.weight,
          .coef_loss = block.coef_loss,
          .coef_lse = block.coef_lse,
          .coef_entropy = block.coef_entropy,
          .advantages = objective ? block.advantages : nullptr,
          .old_logprobs = objective ? block.old_logprobs : nullptr,
          .ref_logprobs = objective ? block.ref_logprobs : nullptr};
}

LossTerms TermsOf(const HeadSizes& sizes, const HeadTensors& tensors, const Chunk& chunk,
                  const ChunkLayout& layout) {
  const LossOptions& options = chunk.options;
  const ValueBuffer& values = tensors.values();
  return {.vocab = sizes.vocab,
          .bias = values.params.bias,
          .class_weights = options.use_class_weights ? values.class_weights + sizes.first_class : nullptr,
          .class_weight_sum =
              options.use_class_weights ? tensors.class_weight_sum() : static_cast<float>(sizes.all_classes),
          .scale = options.logit_scale,
          .softcap = options.softcap,
          .smoothing = options.label_smoothing,
          .z_loss = options.z_loss,
          .want_entropy = layout.want_entropy,
          .any_coef_entropy = layout.any_coef_entropy,
          .first_class = sizes.first_class,
          .elsewhere = sizes.all_classes - sizes.vocab,
          .bias_in_targets = sizes.is_split(),
          .soft = options.has_soft_targets(),
          .objective = options.objective};
}

// For a head that is split: sets which rows' hidden gradients become complete on this device.
void DivideRows(const ClassExchange& exchange, const ChunkSlot& slot, ChunkJob& job) {
  const int64_t rows = job.rows();
  const auto raw = [&](int64_t compact) {
    return compact < rows ? int64_t{slot.host_in.raw_of_compact[compact]} : job.layout.raw_rows;
  };
  job.rows_here = exchange.RowsHere(rows);
  const auto [begin, end] = job.rows_here;
  job.raw_rows_here = {begin == 0 ? 0 : raw(begin), raw(end)};
}

// The error of a chunk whose hidden gradient is not finite, found too late for its slice to fail alone.
absl::Status HiddenGradientLost(bool accumulated) {
  constexpr absl::string_view kWhat =
      "the gradient of a hidden state is not finite though its loss is (look for infinite weights)";
  return accumulated ? absl::DataLossError(kWhat) : absl::InternalError(kWhat);
}

// Finds the rows that must not be accumulated: from their results and, after GuardHiddenGradient, also from
// their hidden gradients.
absl::Status GuardRows(const ChunkJob& job, const ChunkSlot& slot, int32_t* keep, cudaStream_t stream) {
  const GuardParams p = {.slices = job.layout.device_slices,
                         .slice_begin = slot.device_in.slice_begin,
                         .accumulate = job.accumulate,
                         .checks = slot.device_in.checks,
                         .terms = job.terms,
                         .in = job.in,
                         .out = job.out,
                         .gradient_scale = job.weight_gradient_scale,
                         .first_bad = slot.device_out.first_bad,
                         .keep = keep};
  return ToStatus(LaunchGuard(p, stream), "guard kernel");
}

// Finds rows whose hidden gradient is not finite, and runs GuardRows again. In two cases the slice cannot
// fail alone. Then the whole chunk fails, and the accumulated gradients are lost:
// - A path that recomputes logits has already added the rows to the weight gradient.
// - The other parts of a split head do not know of the rows that were found here.
absl::Status GuardHiddenGradient(const HeadConfig& config, const HeadSizes& sizes, const Workspace& workspace,
                                 const ChunkJob& job, const ChunkSlot& slot, cudaStream_t stream) {
  const bool late = config.logits == Logits::kRecomputed && job.layout.accumulate;
  const HiddenGuardParams p = {.gradient = {workspace.paths[Region::kHiddenGradient],
                                            job.hidden_gradient_dtype, sizes.hidden, sizes.padded_hidden},
                               .scale = job.hidden_gradient_factor(),
                               .may_overflow = job.direct && job.hidden_gradient_dtype == DType::kFloat16,
                               .begin = job.rows_here.begin,
                               .end = job.rows_here.end,
                               .checks = slot.device_in.checks,
                               .keep = workspace.keep,
                               .loss = job.out.loss,
                               .lost = late || sizes.is_split() ? slot.device_out.lost : nullptr,
                               .accumulate = sizes.is_split() ? job.accumulate : nullptr};
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchHiddenGuard(p, stream), "guard kernel");
  return GuardRows(job, slot, workspace.keep, stream);
}

// Computes the dot products of the rows with their targets and, for a split head, the targets' columns on
// this part.
absl::Status PlaceTargets(const Device& device, const HeadSizes& sizes, const PathMemory& memory,
                          const void* weight, DType compute, ClassExchange& exchange, const ChunkJob& job) {
  auto* const dots = memory.At<float>(Region::kTargetDots);
  if (dots == nullptr) return absl::OkStatus();
  TargetDotParams p = {job.hidden, weight, compute, sizes.padded_hidden, job.rows(), job.in.targets, dots};
  if (sizes.is_split()) {
    p.targets = job.in.all_targets;
    p.columns = SplitRows::Carve(sizes, memory[Region::kSplitRows]).columns;
    p.classes = sizes.vocab;
    p.bias = job.terms.bias;
  }
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchTargetDots(p, device.compute()), "target kernel");
  return exchange.Sum(ExchangeKind::kRowStatistics, dots, job.rows());
}

// Computes the logits of the classes that slices name. Each class is on one device; the other devices have 0
// for its logit.
absl::Status NamedClasses(const Device& device, const HeadSizes& sizes, const PathMemory& memory,
                          const void* weight, DType compute, ClassExchange& exchange, const ChunkJob& job) {
  const int64_t count = job.layout.class_count;
  if (count == 0) return absl::OkStatus();
  const cudaStream_t stream = device.compute();
  ClassLogitsParams p = {.hidden = job.hidden,
                         .weight = weight,
                         .dtype = compute,
                         .ld = sizes.padded_hidden,
                         .rows = job.rows(),
                         .count = static_cast<int>(count),
                         .terms = job.terms,
                         .classes = job.classes.classes,
                         .logits = job.classes.class_logits()};
  if (!sizes.is_split()) return ToStatus(LaunchClassLogits(p, stream), "class kernel");
  const TopScratch scratch = TopScratch::Carve(sizes, memory[Region::kTopClasses]);
  const int64_t piece = kTopScratchEntries / count;
  const int64_t row_bytes = sizes.padded_hidden * sizes.element;
  for (int64_t begin = 0; begin < job.rows(); begin += piece) {
    p.rows = std::min(piece, job.rows() - begin);
    p.hidden = static_cast<const uint8_t*>(job.hidden) + begin * row_bytes;
    p.classes = job.classes.classes + begin * count;
    p.logits = scratch.own;
    LOSSD_RETURN_IF_CUDA_ERROR(LaunchClassLogits(p, stream), "class kernel");
    LOSSD_RETURN_IF_ERROR(exchange.Sum(ExchangeKind::kRowStatistics, scratch.own, p.rows * count));
    LOSSD_RETURN_IF_ERROR(Copy(job.classes.class_logits() + begin * count, scratch.own,
                               p.rows * count * static_cast<int64_t>(sizeof(float)), stream));
  }
  return absl::OkStatus();
}

// Computes one chunk of zeros. All slices share the memory of their rows. A part of a split head computes
// here without the other parts and may get values that are not finite. An error that reports such values is
// ignored.
absl::Status RunChunkOnce(CudaHead& head, const LossOptions& options, DType hidden_dtype, int64_t rows,
                          bool wants_gradients, bool independent = true) {
  constexpr int64_t kSliceRows = 128;
  const auto bytes =
      static_cast<size_t>(std::min(rows, kSliceRows) * head.config().hidden_size) * SizeOf(hidden_dtype);
  const std::vector<uint8_t> hidden(bytes, 0);
  std::vector<uint8_t> gradients(bytes);
  const std::vector<int32_t> targets(static_cast<size_t>(std::min(rows, kSliceRows)), 0);
  std::vector<Slice> slices;
  for (int64_t begin = 0; begin < rows; begin += kSliceRows) {
    Slice& slice = slices.emplace_back();
    slice.rows = std::min(kSliceRows, rows - begin);
    slice.hidden = hidden.data();
    slice.targets = targets.data();
    if (wants_gradients) slice.grad_hidden = gradients.data();
  }
  Chunk chunk;
  chunk.options = options;
  chunk.hidden_dtype = hidden_dtype;
  chunk.accumulate_gradients = wants_gradients && head.config().trainable;
  chunk.independent = independent;
  chunk.slices = absl::MakeSpan(slices);
  absl::Status results, done;
  absl::Notification ended;
  ChunkCallbacks callbacks;
  callbacks.on_results = [&results](absl::Status status) { results = std::move(status); };
  callbacks.on_done = [&done, &ended](absl::Status status) {
    done = std::move(status);
    ended.Notify();
  };
  head.Submit(&chunk, std::move(callbacks));
  ended.WaitForNotification();
  results.Update(done);
  return absl::IsUnavailable(results) || absl::IsInvalidArgument(results) ? results : absl::OkStatus();
}

// Computes chunks of zeros with weights of 0. So GPU code that is loaded at its first use is loaded before a
// trainer in the same process has work on the GPU. A product is computed in steps (Gemms::TakeSteps); chunks
// with powers of two as numbers of rows use all steps. They are computed
// - without gradients,
// - with every kind of gradient that a request may ask for,
// - with hidden states in the compute dtype and in fp32, because the products of their gradients use
//   different kernels.
//
// Sampled chunks that are not `independent` multiply the most frequent classes in products of their own. The
// parts of a split head are not connected yet, so each part computes alone.
absl::Status RunOnce(CudaHead& head) {
  constexpr Gradients kAll[] = {Gradients::kExact, Gradients::kFiltered, Gradients::kSampled,
                                Gradients::kAuto};
  std::vector<DType> dtypes = {head.config().compute_dtype};
  if (head.config().compute_dtype != DType::kFloat32) dtypes.push_back(DType::kFloat32);
  std::vector<int64_t> counts = {head.chunk_rows()};
  for (int64_t rows = 1; rows < head.chunk_rows(); rows *= 2) counts.push_back(rows);
  for (const int64_t rows : counts) {
    LOSSD_RETURN_IF_ERROR(RunChunkOnce(head, {}, dtypes.front(), rows, /*wants_gradients=*/false));
    for (const DType dtype : dtypes) {
      for (const Gradients gradients : kAll) {
        LOSSD_RETURN_IF_ERROR(
            RunChunkOnce(head, {.gradients = gradients}, dtype, rows, /*wants_gradients=*/true));
      }
      // Chunks with fewer rows than kLeastHotRows have no product of frequent classes, but the last step of
      // the product of a larger chunk may have this number of rows.
      const int64_t with_hot = rows < kLeastHotRows ? kLeastHotRows + rows : rows;
      if (with_hot > head.chunk_rows()) continue;
      LOSSD_RETURN_IF_ERROR(RunChunkOnce(head, {.gradients = Gradients::kSampled}, dtype, with_hot,
                                         /*wants_gradients=*/true, /*independent=*/false));
    }
  }
  return head.config().trainable ? head.ZeroGradients() : absl::OkStatus();
}

}  // namespace

CudaHead::CudaHead(Device* device, CudaTeacherPool* pool, const HeadConfig& config)
    : PooledKernels(pool),
      device_(device),
      config_(config),
      sizes_(SizesOn(*device, config)),
      plan_(PlanMemory(config, sizes_, device->limits().multiprocessors, device->options().replica)),
      host_(config.residency == Residency::kHost ? std::make_optional<HostTensors>(config, sizes_)
                                                 : std::nullopt),
      tensors_(device, config, sizes_, host_.has_value() ? &*host_ : nullptr) {}

// The head leaves the pool first, because a copy to the pool may still read the head's host memory.
CudaHead::~CudaHead() {
  cudaSetDevice(device_->options().device);
  LeavePool();
}

absl::StatusOr<std::unique_ptr<HeadKernels>> CudaHead::Create(Device* device, CudaTeacherPool* pool,
                                                              const HeadConfig& config) {
  std::unique_ptr<CudaHead> head(new CudaHead(device, pool, config));
  LOSSD_RETURN_IF_ERROR(head->Allocate());
  // Heads that recompute logits and heads in host memory do not tune: they take cuBLAS's first choice.
  const bool may_tune = config.logits == Logits::kStored && config.residency == Residency::kDevice;
  const bool tune = may_tune && device->options().autotune && !device->options().deterministic;
  if (tune) LOSSD_RETURN_IF_ERROR(head->Tune());
  LOSSD_RETURN_IF_ERROR(head->MakeChoices());
  const bool runs_once = device->options().shares_process && config.residency == Residency::kDevice &&
                         config.logits != Logits::kNone;
  if (runs_once) {
    device->gemms().LoadCode(true);
    const absl::Status ran = RunOnce(*head);
    device->gemms().LoadCode(false);
    LOSSD_RETURN_IF_ERROR(ran);
    // Leave everything as in a new head.
    LOSSD_RETURN_IF_ERROR(head->Place(head->workspace_buffer_.data(), head->slot_buffer_.data()));
    LOSSD_RETURN_IF_ERROR(Zero(head->workspace_buffer_.data(), head->workspace_.bytes, device->compute()));
    LOSSD_RETURN_IF_ERROR(device->Synchronize());
  }
  return std::unique_ptr<HeadKernels>(std::move(head));
}

absl::Status CudaHead::Allocate() {
  MemoryLedger* ledger = &device_->ledger();
  const int sms = device_->limits().multiprocessors;
  LOSSD_RETURN_IF_ERROR(tensors_.Allocate());
  LOSSD_RETURN_IF_ERROR(slots_.Allocate(ledger, sizes_));
  if (host_.has_value()) {
    const auto moved = [this](const HostedPlaces& places) {
      tensors_.PlaceValues(places.values);
      return Place(places.workspace, places.slots);
    };
    LOSSD_RETURN_IF_ERROR(JoinPool(HostedBytes::Of(config_, sizes_, sms), moved));
    return device_->Synchronize();
  }
  const Workspace workspace = Workspace::Carve(config_, sizes_, sms, nullptr, nullptr);
  LOSSD_RETURN_IF_ERROR(
      Take(DeviceBuffer::Allocate(ledger, MemoryKind::kWorkspace, workspace.bytes), workspace_buffer_));
  LOSSD_RETURN_IF_ERROR(
      Take(DeviceBuffer::Allocate(ledger, MemoryKind::kSlots, workspace.slot_bytes), slot_buffer_));
  LOSSD_RETURN_IF_ERROR(Place(workspace_buffer_.data(), slot_buffer_.data()));
  return device_->Synchronize();
}

absl::Status CudaHead::Place(uint8_t* workspace, uint8_t* slots) {
  workspace_ = Workspace::Carve(config_, sizes_, device_->limits().multiprocessors, workspace, slots);
  tensors_.Use({workspace_.upload_buffer, workspace_.square_sums});
  slots_.Place(workspace_);
  transfers_.emplace(device_, config_, sizes_, workspace_);
  LOSSD_RETURN_IF_ERROR(transfers_->Start());
  norm_.emplace(device_, config_, sizes_, workspace_, &tensors_, &link_);
  planner_.emplace(*device_, config_, sizes_, &*norm_);
  paths_.emplace(PathContext{.device = device_,
                             .config = config_,
                             .sizes = sizes_,
                             .memory = workspace_.paths,
                             .weight_place = &tensors_.values().compute_weight,
                             .accumulators = &tensors_.accumulators(),
                             .keep = workspace_.keep,
                             .download_idle = &transfers_->download_idle(),
                             .link = &link_});
  embedding_.emplace(device_, config_, sizes_, workspace_, &tensors_, &link_, &*transfers_);
  return absl::OkStatus();
}

absl::Status CudaHead::Tune() {
  const cudaStream_t stream = device_->compute();
  void* const weight = tensors_.values().compute_weight;
  void* const hidden = slots_.first().memory.hidden;
  const int64_t weight_elements = sizes_.padded_vocab * sizes_.padded_hidden;
  // Products of zeros run faster than others, so the operands are filled first and zeroed afterwards.
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchFillPattern(weight, config_.compute_dtype, weight_elements, stream),
                             "pattern kernel");
  LOSSD_RETURN_IF_CUDA_ERROR(
      LaunchFillPattern(hidden, config_.compute_dtype, sizes_.chunk_rows * sizes_.padded_hidden, stream),
      "pattern kernel");
  LOSSD_RETURN_IF_ERROR(paths_->Tune(hidden));
  if (config_.trainable) {
    LOSSD_RETURN_IF_ERROR(
        Zero(tensors_.gradients().weight, weight_elements * static_cast<int64_t>(sizeof(float)), stream));
  }
  LOSSD_RETURN_IF_ERROR(Zero(weight, weight_elements * sizes_.element, stream));
  return device_->Synchronize();
}

absl::Status CudaHead::MakeChoices() {
  choices_ = {ChunkChoice(config_, sizes_, plan_, device_->options().max_chunk_rows)};
  if (config_.logits == Logits::kNone) {
    choices_.push_back(NoLogitsChoice());
    return absl::OkStatus();
  }
  ChunkFacts full;
  full.terms.vocab = sizes_.vocab;
  full.terms.elsewhere = sizes_.all_classes - sizes_.vocab;
  full.terms.bias = tensors_.values().params.bias;
  full.rows = full.padded_rows = sizes_.chunk_rows;
  full.wants_gradient = true;
  const ChunkPlan plan = planner_->Plan({.gradients = config_.gradients}, full, config_.compute_dtype);
  absl::StatusOr<std::vector<Choice>> choices = paths_->Describe(plan);
  if (!choices.ok()) return choices.status();
  std::move(choices->begin(), choices->end(), std::back_inserter(choices_));
  return absl::OkStatus();
}

// ---- a chunk ----

void CudaHead::Submit(Chunk* chunk, ChunkCallbacks callbacks) {
  auto pending = std::make_shared<Pending>();
  pending->job.chunk = chunk;
  absl::Status status = CheckChunk(*chunk);
  if (status.ok()) {
    status = Prepare(chunk, *pending);
    if (status.ok() && pending->job.rows() > 0)
      status = link_.exchange->Watched([&] { return Enqueue(*pending); });
  }
  if (!status.ok()) link_.exchange->Abort(status);  // the other parts wait for an exchange that does not come
  Report(pending, std::move(status), std::move(callbacks));
}

absl::Status CudaHead::CheckChunk(const Chunk& chunk) const {
  LOSSD_RETURN_IF_ERROR(device_->MakeCurrent());
  if (device_->in_flight() >= Device::kMaxChunksInFlight) {
    return absl::FailedPreconditionError(
        absl::StrCat("Submit: ", Device::kMaxChunksInFlight, " chunks are already in flight"));
  }
  LOSSD_RETURN_IF_ERROR(ValidateChunk(config_, sizes_.chunk_rows, chunk));
  if (chunk.options.is_embedding() && is_pooled()) {
    return errors::FieldError("embedding", "be absent: the head lives in memory of the host", "given",
                              absl::StatusCode::kUnimplemented);
  }
  return chunk.teacher == nullptr ? absl::OkStatus() : CheckTeacher(*chunk.teacher);
}

// ---- a teacher's part of a chunk ----

// All parts of a split head get the same result.
int64_t CudaHead::Lesson::MostRows(const CudaHead& head) {
  const HeadSizes& sizes = head.sizes_;
  const int64_t matrix = sizes.chunk_rows * sizes.planned_vocab() * sizes.element;  // ClaimGradients
  const int64_t bytes = head.config_.logits == Logits::kStored ? matrix : sizes.arena_bytes;
  return bytes / (sizes.planned_vocab() * static_cast<int64_t>(sizeof(float))) / 8 * 8;
}

absl::Status CudaHead::CheckTeacher(const HeadKernels& teacher) const {
  const auto classes = [](const HeadSizes& sizes) { return ShardRows{sizes.first_class, sizes.vocab}; };
  const auto* const other = dynamic_cast<const CudaHead*>(&teacher);
  const bool same_device = other != nullptr && other->device_ == device_;
  LOSSD_RETURN_IF_ERROR(ValidateTeacherPart({config_, classes(sizes_)},
                                            {teacher.config(), classes(same_device ? other->sizes_ : sizes_)},
                                            same_device));
  const int64_t room = Lesson::MostRows(*other);
  const bool fits =
      config_.logits == Logits::kRecomputed ? DistilledRecomputedPath::BlockRows(sizes_, room) > 0 : room > 0;
  if (other->sizes_.chunk_rows < sizes_.chunk_rows || !fits) {
    return errors::FieldError(
        "distillation.teacher",
        absl::StrCat("be a head whose chunks have at least the rows of the student's, ", sizes_.chunk_rows,
                     ", and room for logits of at least ", config_.logits == Logits::kRecomputed ? 32 : 8,
                     " rows (HeadSpec.workspace_bytes)"),
        absl::StrCat("one with ", other->sizes_.chunk_rows, " rows, and room for ", room),
        absl::StatusCode::kUnimplemented);
  }
  return absl::OkStatus();
}

CudaHead::Lesson::Lesson(CudaHead* teacher, const Chunk& chunk)
    : teacher_(teacher), slot_(&teacher->slots_.Next()) {
  const HeadSizes& sizes = teacher->sizes_;
  const HeadConfig& config = teacher->config_;
  // A chunk of the teacher with the same rows and targets. So row r of the teacher belongs to row r of the
  // student.
  rows_.wants_logprob = false;
  for (const Slice& slice : chunk.slices) {
    Slice taught;
    taught.rows = slice.rows;
    taught.hidden = slice.teacher_hidden;
    taught.targets = slice.targets;
    taught.row_weights = slice.row_weights;
    slices_.push_back(taught);
    rows_.wants_logprob |= slice.out.target_logprob != nullptr;
  }
  chunk_.hidden_dtype = chunk.hidden_dtype;
  chunk_.accumulate_gradients = false;
  chunk_.slices = absl::MakeSpan(slices_);
  job_.chunk = &chunk_;
  slot_->LayOut(chunk_);
  job_.layout = LayOutChunk({config, config.compute_dtype, sizes.chunk_rows, 1.0f, sizes.first_class}, chunk_,
                            slot_->host_in);
  job_.hidden = slot_->memory.hidden;
  job_.direct = chunk.hidden_dtype == config.compute_dtype && !teacher->norm_->exists();

  const Distillation& distillation = chunk.options.distillation;
  rows_.hidden = job_.hidden;
  rows_.weight = teacher->tensors_.values().compute_weight;
  rows_.shapes = {sizes.padded_hidden, config.compute_dtype};
  rows_.element = sizes.element;
  rows_.padded_vocab = sizes.padded_vocab;
  rows_.terms.vocab = sizes.vocab;
  rows_.terms.bias = teacher->tensors_.values().params.bias;
  rows_.terms.scale = distillation.teacher_logit_scale;
  rows_.terms.softcap = distillation.teacher_softcap;
  rows_.logits = teacher->workspace_.paths.At<float>(Region::kLogits);
  rows_.block_rows = MostRows(*teacher);
  // A lesson has no results, so the memory for them in its slot is free.
  Carver results(slot_->memory.outputs);
  rows_.rows = DivergenceRows::Carve(results, sizes.chunk_rows);
}

absl::Status CudaHead::Lesson::Enqueue() const {
  LOSSD_RETURN_IF_ERROR(Await(slot_->uploaded, teacher_->device_->compute()));
  return teacher_->norm_->exists() ? teacher_->norm_->Forward(job_, *slot_) : absl::OkStatus();
}

absl::Status CudaHead::Prepare(Chunk* chunk, Pending& pending) {
  ChunkSlot& slot = slots_.Next();
  ChunkJob& job = pending.job;
  pending.slot = &slot;
  const LayoutHead layout_head = {config_, config_.compute_dtype, sizes_.chunk_rows,
                                  chunk->options.use_class_weights ? tensors_.largest_class_weight() : 1.0f,
                                  sizes_.first_class};
  slot.LayOut(*chunk);
  job.layout = LayOutChunk(layout_head, *chunk, slot.host_in);
  if (chunk->options.is_embedding()) {
    DivideRows(*link_.exchange, slot, job);
    embedding_->Prepare(job, slot);
    return absl::OkStatus();
  }
  for (CudaHead* head : {this, static_cast<CudaHead*>(chunk->teacher)}) {  // CheckTeacher: it is a CudaHead
    if (head == nullptr || !head->is_pooled() || job.rows() == 0) continue;
    std::unique_ptr<CudaTeacherPool::Copied> copied;
    absl::StatusOr<HostedPlaces> places = head->UsePool(head->host_->data(), copied);
    if (!places.ok()) return device_->Fail(places.status());
    head->tensors_.PlaceValues(places->values);
    if (copied != nullptr) pending.copied.push_back(std::move(copied));
  }
  job.terms = TermsOf(sizes_, tensors_, *chunk, job.layout);
  job.in =
      InputsOf(job.layout, chunk->options, slot.device_in, workspace_.paths.At<float>(Region::kTargetDots));
  if (sizes_.is_split()) {
    job.in.all_targets = job.in.targets;
    job.in.targets = SplitRows::Carve(sizes_, workspace_.paths[Region::kSplitRows]).columns;
  }
  const RowOutputBlock& out = slot.device_out;
  job.out = {out.loss, out.z_loss, out.lse, out.entropy, out.target_logprob, out.argmax};
  job.accumulate = slot.device_in.accumulate;
  job.with_gradient = slot.device_in.with_gradient;
  job.dropped_mass = out.dropped_mass;
  job.omega = slot.device_in.omega;
  job.variance = out.variance;
  job.square = out.square;
  job.divergence = out.divergence;
  job.sample_threshold = out.sample_threshold;
  job.decision = out.decision;
  job.classes = slot.classes;
  cuda::PlaceClasses(job.layout, slot.host_in, slot.classes);
  if (job.terms.soft) {
    PlaceSoftTargets(job.layout, chunk->options.rest, slot.host_in, slot.classes);
    job.in.soft = {job.layout.target_count,    slot.classes.target_classes(), slot.classes.target_weights(),
                   slot.classes.target_logits, slot.device_in.target_total,   slot.device_in.target_rest,
                   slot.classes.named};
    if (job.in.target_dots == nullptr) job.in.target_dots = slot.classes.target_dots;
  }
  job.hidden = slot.memory.hidden;
  job.loss_branch = &slot.loss_branch;
  job.weight_branch = &slot.weight_branch;

  const float t = chunk->options.logit_scale;
  // DistilledRecomputedPath computes dx and dW in the same function, so it must also compute dx if the chunk
  // only accumulates.
  const bool together = chunk->teacher != nullptr && config_.logits == Logits::kRecomputed;
  job.wants_hidden_gradient =
      job.layout.want_hidden_gradient || (job.layout.accumulate && (norm_->exists() || together));
  job.direct = chunk->hidden_dtype == config_.compute_dtype && !norm_->exists() && !sizes_.is_split();
  // The paths compute W^T ds from a ds that is divided by (t * unit). If dx is direct, it is copied as it is,
  // so the product multiplies it by both. Otherwise the product multiplies it by t only, which keeps it in
  // range, and the conversion multiplies it by the unit (hidden_gradient_factor).
  job.hidden_gradient_dtype =
      job.direct ? config_.compute_dtype : HiddenGradientDType(sizes_, config_.compute_dtype);
  job.hidden_gradient_scale = job.direct ? t * job.layout.unit : t;
  job.weight_gradient_scale = job.layout.unit * t;
  DivideRows(*link_.exchange, slot, job);

  if (chunk->teacher != nullptr) {
    // CheckTeacher has made sure that the teacher is a CudaHead.
    pending.lesson = std::make_unique<Lesson>(static_cast<CudaHead*>(chunk->teacher), *chunk);
    job.teacher = pending.lesson->rows();
  }
  job.plan = planner_->Next(*chunk,
                            {job.terms, job.rows(), job.padded_rows(), job.wants_gradient(),
                             chunk->teacher != nullptr, job.layout.top_k > 0},
                            slot);
  job.layout.planned = job.plan.gradients;
  chunk->choices = cuda::Describe(job.plan);
  return absl::OkStatus();
}

// The downloads are enqueued before the weight gradient, for which no result waits. EndUse also comes before
// it: it concerns only heads in host memory, which have no weight gradient, and teachers, which it does not
// read.
absl::Status CudaHead::Enqueue(const Pending& pending) {
  const ChunkJob& job = pending.job;
  if (job.options().is_embedding()) return device_->Fail(embedding_->Enqueue(job, *pending.slot));
  ChunkPath& path = paths_->For(job.plan);
  LOSSD_RETURN_IF_ERROR(path.Prepare(job));
  const auto phases = [&]() -> absl::Status {
    LOSSD_RETURN_IF_ERROR(transfers_->Upload(job, *pending.slot));
    if (pending.lesson != nullptr) LOSSD_RETURN_IF_ERROR(pending.lesson->Upload());
    LOSSD_RETURN_IF_ERROR(Loss(pending, path));
    if (job.wants_hidden_gradient) LOSSD_RETURN_IF_ERROR(HiddenGradient(pending, path));
    LOSSD_RETURN_IF_ERROR(EndUse());
    if (pending.lesson != nullptr) LOSSD_RETURN_IF_ERROR(pending.lesson->EndUse());
    LOSSD_RETURN_IF_ERROR(transfers_->Download(job, *pending.slot));
    if (!job.layout.accumulate) return Record(pending.slot->done, device_->compute());
    return device_->InBackground(pending.slot->done, [&] { return path.WeightGradient(job); });
  };
  absl::Status status = phases();
  return status.ok() ? status : device_->Fail(std::move(status));
}

absl::Status CudaHead::Loss(const Pending& pending, ChunkPath& path) {
  const ChunkJob& job = pending.job;
  const ChunkSlot& slot = *pending.slot;
  const cudaStream_t stream = device_->compute();
  LOSSD_RETURN_IF_ERROR(Await(slot.uploaded, stream));
  if (norm_->exists()) LOSSD_RETURN_IF_ERROR(norm_->Forward(job, slot));
  if (pending.lesson != nullptr) LOSSD_RETURN_IF_ERROR(pending.lesson->Enqueue());
  // Both functions take the same arguments. Their results are inputs of the path, or results of the chunk.
  const void* const weight = tensors_.values().compute_weight;
  for (const auto step : {&PlaceTargets, &NamedClasses}) {
    LOSSD_RETURN_IF_ERROR(
        step(*device_, sizes_, workspace_.paths, weight, config_.compute_dtype, *link_.exchange, job));
  }
  LOSSD_RETURN_IF_ERROR(path.Loss(job));
  LOSSD_RETURN_IF_ERROR(Zero(slot.device_out.lost, sizeof(*slot.device_out.lost), stream));
  LOSSD_RETURN_IF_ERROR(GuardRows(job, slot, workspace_.keep, stream));
  return Record(slot.row_results, stream);
}

absl::Status CudaHead::HiddenGradient(const Pending& pending, ChunkPath& path) {
  const ChunkJob& job = pending.job;
  LOSSD_RETURN_IF_ERROR(path.HiddenGradient(job));
  auto* const dx = workspace_.paths.At<float>(Region::kHiddenGradient);
  LOSSD_RETURN_IF_ERROR(link_.exchange->SumRows(dx, job.rows(), sizes_.padded_hidden));
  LOSSD_RETURN_IF_ERROR(
      GuardHiddenGradient(config_, sizes_, workspace_, job, *pending.slot, device_->compute()));
  if (norm_->exists()) LOSSD_RETURN_IF_ERROR(norm_->Backward(pending.job, *pending.slot));
  return Record(pending.slot->hidden_gradient, device_->compute());
}

// `results` and `wait_done` run on the completion thread. Of a split head only part 0 writes the results to
// the slices, because all parts have the same row results.
void CudaHead::Report(const std::shared_ptr<Pending>& pending, absl::Status status,
                      ChunkCallbacks callbacks) {
  const bool on_device = status.ok() && pending->job.rows() > 0;
  auto shared = std::make_shared<ChunkCallbacks>(std::move(callbacks));
  auto final_status = std::make_shared<absl::Status>(status);
  Device* device = device_;
  Device::Completion completion;
  completion.results = [pending, on_device, shared, final_status, device, hidden = sizes_.hidden,
                        exchange = link_.exchange.get(), reports = sizes_.part == 0, pool = pool_] {
    if (on_device) *final_status = device->Fail(exchange->Wait(pending->slot->results));
    // Copies to the slices' memory may still be under way. The caller may reuse that memory as soon as it is
    // told of the failure, so wait for the copies first.
    if (!final_status->ok() && pending->slot != nullptr) *final_status = device->Drain(*final_status);
    if (final_status->ok() && on_device && *pending->slot->host_out.lost != 0) {
      *final_status = HiddenGradientLost(pending->job.layout.accumulate);
    }
    if (final_status->ok() && reports) {
      UnpackResults(*pending->job.chunk, pending->job.layout, pending->slot->host_in, pending->slot->host_out,
                    pending->slot->classes);
      *final_status = device->Fail(ZeroUntouchedGradients(*pending->job.chunk, pending->job.layout, hidden));
    }
    if (final_status->ok()) {
      for (const auto& copied : pending->copied) pool->Count(*copied);
    }
    shared->on_results(*final_status);
  };
  completion.wait_done = [pending, on_device, final_status, device, exchange = link_.exchange.get()] {
    if (!on_device || !final_status->ok()) return;
    *final_status = device->Fail(exchange->Wait(pending->slot->done));
    if (!final_status->ok()) *final_status = device->Drain(*final_status);
  };
  completion.done = [shared, final_status] { shared->on_done(*final_status); };
  device_->Enqueue(std::move(completion));
}

}  // namespace lossd::kernels::cuda
