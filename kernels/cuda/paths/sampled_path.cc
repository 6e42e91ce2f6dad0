// SPDX-License-Identifier: Apache-2.0
// The paths of sampled gradients (sampled_path.h): first SampledStoredPath, then SampledRecomputedPath. The
// kernels are in sampled.h; path_steps.h has the steps that parts of a split head take together
// (GradientMerger).
//
// ds is the matrix dL/ds of a chunk (dense), and the list is what replaces it: a few elements of each row. An
// element of the list is an entry. The list is in three buffers, one after the other:
// 1. `listed` lies where dx will be (Region::kHiddenGradient). Loss selects the entries from ds and writes
//    them here. Region::kLogits holds ds, which is still read, and dx is not yet written.
// 2. `entries` lies where ds was (Region::kLogits). GatherRows copies the complete list here. Then it
//    computes dx from `entries`, and writes dx over `listed`.
// 3. `kept` lies behind `entries`. While GatherRows computes dx, it also copies the entries of the rows that
//    are accumulated here, in a form that can be sorted by class. AddEntries computes dW from `kept`.
//
// The level says how often the threshold has been doubled because the list was too small (kSampleLevels in
// loss_rows.h); level 0 is the threshold that the request asks for. Hot classes are the classes that chunks
// take most often: their elements of ds are not listed, but copied to a narrow dense matrix (hot_listed,
// later hot_elements), and products of their own add them to dx and dW. A rule (GradientRule) has what the
// exact gradient of a row needs besides its logits.
#include "kernels/cuda/paths/sampled_path.h"

#include <algorithm>
#include <cstddef>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/kernels/hopper/fused_loss.h"
#include "kernels/cuda/kernels/row_loss.h"
#include "kernels/cuda/kernels/rows.h"
#include "kernels/cuda/paths/path_steps.h"

namespace lossd::kernels::cuda {

SampledStoredPath::SampledStoredPath(const PathContext& context)
    : context_(context),
      shapes_{context.sizes.padded_hidden, context.config.compute_dtype},
      fused_(context),
      stored_(context),
      merger_(context) {
  Carver own(context.memory[Region::kFilter]), hidden(context.memory[Region::kHiddenGradient]),
      logits(context.memory[Region::kLogits]);
  const FilterShape shape = FilterShapeOf(context.config, context.sizes);
  buffers_ = SampleBuffers::Carve(shape, own, hidden, logits);
  Carver hot(context.memory[Region::kPopularity]);
  hot_ = CarveHotClasses(shape, hot);
  hot_bytes_ = hot.used();
}

int64_t SampledStoredPath::CapacityOf(const ChunkJob& job) const {
  return SampleCapacity(FilterShapeOf(context_.config, context_.sizes), job.rows(), ThresholdOf(job));
}

// The selection kernels always write a variance and a square for each row. For filtered gradients the results
// have neither, and the merger's memory for them holds the dropped masses. So the kernels then write to the
// chunk's own memory, which is not read.
SampleList SampledStoredPath::ListOf(const ChunkJob& job) const {
  const bool sampled = job.plan.sampled();
  return {.entries = buffers_.listed,
          .capacity = static_cast<int32_t>(CapacityOf(job)),
          .rows = buffers_.rows,
          .counters = buffers_.counters,
          .variance = sampled ? merger_.variance(job) : job.variance,
          .square = sampled ? merger_.square(job) : job.square};
}

absl::Status SampledStoredPath::Prepare(const ChunkJob& job) {
  if (UsesHot(job)) {
    Gemms& gemms = context_.device->gemms();
    LOSSD_RETURN_IF_ERROR(gemms.Prepare(HotHiddenShape(job)));
    LOSSD_RETURN_IF_ERROR(gemms.Prepare(HotWeightShape(job)));
  }
  return job.plan.fused() ? fused_.Prepare(job) : stored_.Prepare(job);
}

// Independent chunks use no hot classes, because their result must not depend in any bit on the classes that
// earlier chunks have taken.
bool SampledStoredPath::UsesHot(const ChunkJob& job) const {
  return hot_.bits != nullptr && !job.chunk->independent && job.rows() >= kLeastHotRows;
}

GemmShape SampledStoredPath::HotHiddenShape(const ChunkJob& job) const {
  return shapes_.HiddenGradient(job.padded_rows(), kHotClasses, DType::kFloat32);
}

GemmShape SampledStoredPath::HotWeightShape(const ChunkJob& job) const {
  return shapes_.WeightGradient(job.padded_rows(), kHotClasses);
}

absl::Status SampledStoredPath::Loss(const ChunkJob& job) {
  LOSSD_RETURN_IF_ERROR(job.plan.fused() ? fused_.Loss(job) : stored_.Loss(job));
  return Sample(job);
}

absl::Status SampledStoredPath::Sample(const ChunkJob& job) {
  const cudaStream_t stream = context_.device->compute();
  LOSSD_RETURN_IF_ERROR(Await(*context_.download_idle, stream));  // the list lies where dx will be
  LOSSD_RETURN_IF_ERROR(Zero(buffers_.counters, sizeof(SampleCounters), stream));
  LOSSD_RETURN_IF_ERROR(Zero(buffers_.runs, sizeof(RunCounters), stream));
  if (UsesHot(job)) LOSSD_RETURN_IF_ERROR(BeginHot(job));
  if (job.plan.filters_elements) return ListFiltered(job);
  LOSSD_RETURN_IF_ERROR(merger_.Sample(SampleOf(job)));
  LOSSD_RETURN_IF_ERROR(merger_.MergeErrors(job));
  return DecideSampled(context_, job, buffers_.counters);
}

SampleRowsParams SampledStoredPath::SampleOf(const ChunkJob& job) const {
  return {.elements = stored_.elements(),
          .factors = Factors(job),
          .terms = job.terms,
          .in = job.in,
          .lse = job.out.lse,
          .target_logprob = job.out.target_logprob,
          .kappas = job.teacher != nullptr ? job.teacher->rows.factors : nullptr,
          .omega = job.omega,
          .with_gradient = job.with_gradient,
          .threshold = ThresholdOf(job),
          .list = ListOf(job),
          .hot = HotPartOf(job)};
}

// The matrix has the filtered ds, so the decision is always "as planned", which is 0. The list is only a
// faster way to the same gradients. With label smoothing no element is 0. Then the list would be too long,
// and the gradients are computed from the matrix.
absl::Status SampledStoredPath::ListFiltered(const ChunkJob& job) const {
  const cudaStream_t stream = context_.device->compute();
  static_assert(static_cast<int32_t>(Decision::kAsPlanned) == 0);
  LOSSD_RETURN_IF_ERROR(Zero(job.decision, sizeof(*job.decision), stream));
  LOSSD_RETURN_IF_ERROR(merger_.MergeDroppedMass(job));
  if (job.terms.smoothing > 0.0f) return absl::OkStatus();
  return ToStatus(LaunchSampleRows(SampleOf(job), stream), "selection kernels");
}

absl::Status SampledStoredPath::Branch(const ChunkJob& job, DeviceBranch& branch,
                                       absl::FunctionRef<absl::Status()> dense,
                                       absl::FunctionRef<absl::Status()> listed) const {
  if (!job.plan.filters_elements) return BranchByDecision(context_, job, branch, dense, listed);
  if (job.terms.smoothing > 0.0f) return dense();
  // The level is not 0 if the elements that the filter has left do not fit into the list. Then some of them
  // are not listed, so the gradients are computed from the matrix.
  return BranchByFlag(context_, &buffers_.counters->level, branch, dense, listed);
}

HotPart SampledStoredPath::HotPartOf(const ChunkJob& job) const {
  return UsesHot(job) ? HotPart{hot_, buffers_.hot_listed, buffers_.hot_widths} : HotPart{};
}

// Before the first chunk, zeroes the hot classes: none is hot, and none has been counted. Before each chunk
// that uses them, zeroes the padding rows of the dense part, which the products read.
absl::Status SampledStoredPath::BeginHot(const ChunkJob& job) {
  const cudaStream_t stream = context_.device->compute();
  if (!knows_hot_) LOSSD_RETURN_IF_ERROR(Zero(hot_.bits, hot_bytes_, stream));
  knows_hot_ = true;
  const int64_t row_bytes = kHotClasses * context_.sizes.element;
  const int64_t padding = job.padded_rows() - job.rows();
  if (padding == 0) return absl::OkStatus();
  return Zero(static_cast<uint8_t*>(buffers_.hot_listed) + job.rows() * row_bytes, padding * row_bytes,
              stream);
}

// Region::kHiddenGradient may be overwritten. The dx of the chunk before has left it, because Sample has
// waited for download_idle. Now it holds the list: the dense work does not read the list, and GatherRows
// copies the list away before it writes dx.
absl::Status SampledStoredPath::HiddenGradient(const ChunkJob& job) {
  return Branch(
      job, *job.loss_branch,
      [&] { return job.plan.fused() ? fused_.HiddenGemm(job) : stored_.HiddenGemm(job); },
      [&] { return GatherRows(job); });
}

absl::Status SampledStoredPath::WeightGradient(const ChunkJob& job) {
  LOSSD_RETURN_IF_ERROR(ZeroDroppedHidden(context_, job));
  LOSSD_RETURN_IF_ERROR(Branch(
      job, *job.weight_branch,
      [&] { return job.plan.fused() ? fused_.WeightGemm(job) : stored_.WeightGemm(job); },
      [&] { return AddKept(job); }));
  context_.accumulators->weight_is_zero = false;
  return absl::OkStatus();
}

// Copies the list and the dense part from the memory of dx, which is written next, to the memory of the
// matrix, which is no longer read.
absl::Status SampledStoredPath::CopyLists(const ChunkJob& job) const {
  const cudaStream_t stream = context_.device->compute();
  const auto copy = [stream](void* to, const void* from, int64_t bytes) {
    return ToStatus(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream),
                    "cudaMemcpyAsync");
  };
  LOSSD_RETURN_IF_ERROR(
      copy(buffers_.entries, buffers_.listed, CapacityOf(job) * static_cast<int64_t>(sizeof(SampleEntry))));
  if (!UsesHot(job)) return absl::OkStatus();
  return copy(buffers_.hot_elements, buffers_.hot_listed,
              job.padded_rows() * kHotClasses * context_.sizes.element);
}

// With hot classes, dx begins with the product of their dense matrix (`dense`), and LaunchSampledHidden adds
// the entries of the list. The factors of a fused chunk are applied to the dense part here, because only the
// values of entries already include them.
absl::Status SampledStoredPath::GatherRows(const ChunkJob& job) const {
  const cudaStream_t stream = context_.device->compute();
  LOSSD_RETURN_IF_ERROR(CopyLists(job));
  SampleList list = ListOf(job);
  list.entries = buffers_.entries;
  SampledHiddenParams p = HiddenParamsOf(context_, job, list, job.in, 0);
  if (job.plan.uniform_apart && job.wants_hidden_gradient) {
    LOSSD_RETURN_IF_ERROR(SumWeights(context_, job, buffers_.kept));
    p.weight_sum = buffers_.kept.weight_sum;
  }
  if (job.layout.accumulate) {
    LOSSD_RETURN_IF_ERROR(ClearEntries(context_, buffers_.kept, CapacityOf(job)));
    p.accumulate = job.accumulate;
    p.kept = {buffers_.kept.keys, buffers_.kept.coefs, nullptr, RowBits(job.rows()), 0};
  }
  if (!UsesHot(job)) return ToStatus(LaunchSampledHidden(p, stream), "sampled gradient kernel");
  p.taken = hot_.taken;
  if (job.wants_hidden_gradient) {
    LOSSD_RETURN_IF_ERROR(MultiplyHotHidden(job));
    p.dense = buffers_.hot_hidden;
    p.dense_factors = Factors(job);
  }
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchSampledHidden(p, stream), "sampled gradient kernel");
  return ChooseHot(job);
}

const float* SampledStoredPath::Factors(const ChunkJob& job) const {
  return job.plan.fused() ? fused_.factors() : nullptr;
}

absl::Status SampledStoredPath::MultiplyHotHidden(const ChunkJob& job) const {
  Device& device = *context_.device;
  LOSSD_RETURN_IF_CUDA_ERROR(
      LaunchGatherHot(hot_, context_.weight(), context_.config.compute_dtype, context_.sizes.padded_hidden,
                      buffers_.hot_weight, device.compute()),
      "gather kernel");
  return device.gemms().Run(HotHiddenShape(job),
                            {.a = buffers_.hot_weight, .b = buffers_.hot_elements, .c = buffers_.hot_hidden},
                            device.gemm_workspace(), device.compute());
}

// Counts the classes that this chunk has taken, and chooses the hot classes of the next chunk. The hot
// classes of this chunk are needed until its dW is computed. So if the chunk accumulates, AddKept makes the
// choice.
absl::Status SampledStoredPath::ChooseHot(const ChunkJob& job) const {
  const cudaStream_t stream = context_.device->compute();
  const CountHotParams count = {.hot = hot_,
                                .elements = buffers_.hot_elements,
                                .dtype = context_.config.compute_dtype,
                                .widths = buffers_.hot_widths,
                                .rows = job.rows()};
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchCountHot(count, stream), "counting kernel");
  if (job.layout.accumulate) return absl::OkStatus();
  return ToStatus(LaunchChooseHot(hot_, LeastTaken(job.rows()), stream), "choosing kernels");
}

// If no dx is wanted, the head has not called HiddenGradient, so the list has not been gathered yet.
absl::Status SampledStoredPath::AddKept(const ChunkJob& job) const {
  if (!job.wants_hidden_gradient) LOSSD_RETURN_IF_ERROR(GatherRows(job));
  LOSSD_RETURN_IF_ERROR(AddEntries(context_, job, buffers_.kept, CapacityOf(job), buffers_.runs));
  if (job.plan.uniform_apart) LOSSD_RETURN_IF_ERROR(AddUniform(context_, job, buffers_.kept));
  if (!UsesHot(job)) return absl::OkStatus();
  LOSSD_RETURN_IF_ERROR(AddHot(job));
  return ToStatus(LaunchChooseHot(hot_, LeastTaken(job.rows()), context_.device->compute()),
                  "choosing kernels");
}

// Multiplies job.hidden by the factors of the rows, if there are any. So it comes after AddEntries and
// AddUniform, which need the hidden states as they were.
absl::Status SampledStoredPath::AddHot(const ChunkJob& job) const {
  Device& device = *context_.device;
  const cudaStream_t stream = device.compute();
  const int64_t ld = context_.sizes.padded_hidden;
  const DType dtype = context_.config.compute_dtype;
  const float* const factors = Factors(job);
  ScatterHotParams scatter = {.hot = hot_,
                              .from = buffers_.hot_weight_gradient,
                              .ld = ld,
                              .scale = job.weight_gradient_scale,
                              .weight_gradient = context_.accumulators->weight};
  if (context_.accumulators->bias != nullptr) {
    const DeviceMatrix elements = {buffers_.hot_elements, dtype, kHotClasses, kHotClasses};
    LOSSD_RETURN_IF_ERROR(
        Zero(buffers_.hot_bias_gradient, kHotClasses * static_cast<int64_t>(sizeof(float)), stream));
    LOSSD_RETURN_IF_CUDA_ERROR(
        LaunchColumnSum(elements, context_.keep, factors, job.rows(), job.weight_gradient_scale,
                        buffers_.hot_partials, buffers_.hot_bias_gradient, stream),
        "column sum kernel");
    scatter.bias_from = buffers_.hot_bias_gradient;
    scatter.bias_gradient = context_.accumulators->bias;
  }
  if (factors != nullptr) {
    const DeviceMatrix hidden = {job.hidden, dtype, ld, ld};
    LOSSD_RETURN_IF_CUDA_ERROR(LaunchScaleRows(hidden, factors, 1.0f, context_.keep, job.rows(), stream),
                               "kernel over hidden states");
  }
  LOSSD_RETURN_IF_ERROR(device.gemms().Run(
      HotWeightShape(job), {.a = job.hidden, .b = buffers_.hot_elements, .c = buffers_.hot_weight_gradient},
      device.gemm_workspace(), stream));
  return ToStatus(LaunchScatterHot(scatter, stream), "scatter kernel");
}

absl::StatusOr<std::vector<Choice>> SampledStoredPath::Describe(const ChunkPlan& plan) {
  return plan.fused() ? fused_.Describe(plan) : stored_.Describe(plan);
}

std::vector<Choice> SampledStoredPath::DescribeMemory(const ChunkPlan& plan) const {
  const FilterShape shape = FilterShapeOf(context_.config, context_.sizes);
  Carver own(nullptr), hidden(nullptr), logits(nullptr);
  SampleBuffers::Carve(shape, own, hidden, logits);
  const absl::string_view reason = WhyNotSampledOnDevice(shape, context_.device->limits());
  return {{.what = "sampled gradients",
           .choice = reason.empty() ? absl::StrCat("up to ", kMostPooledSamples, " classes a row on average")
                                    : "never",
           .reason = std::string(reason),
           .workspace_bytes = own.used()}};
}

SampledRecomputedPath::SampledRecomputedPath(const PathContext& context)
    : context_(context), exact_(context), merger_(context), top_(context) {
  Carver own(context.memory[Region::kFilter]), hidden(context.memory[Region::kHiddenGradient]),
      arena(context.memory[Region::kLogits]);
  buffers_ = RecomputedSampleBuffers::Carve(ShapeOfHead(), own, hidden, arena);
}

FilterShape SampledRecomputedPath::ShapeOfHead() const {
  return FilterShapeOf(context_.config, context_.sizes);
}

FilterShape SampledRecomputedPath::ShapeOf(const ChunkJob& job) const {
  FilterShape shape = ShapeOfHead();
  shape.chunk_rows = job.rows();
  return shape;
}

// Every row has an equal share of the room for entries. The rows of a block use their shares together.
int64_t SampledRecomputedPath::FirstEntry(const ChunkJob& job, int64_t row) const {
  return ShapeOf(job).entries() / job.rows() * row;
}

absl::Status SampledRecomputedPath::Prepare(const ChunkJob& job) {
  LOSSD_RETURN_IF_ERROR(exact_.Prepare(job));
  block_rows_ =
      context_.device->options().smallest_blocks ? kLeastBlockRows : BlockRows(job.plan, job.padded_rows());
  if (LeavesExponentials(job.plan)) return absl::OkStatus();
  return ForEachRowBlock(job, block_rows_, [&](const RowBlock& rows) {
    return context_.device->gemms().Prepare(exact_.LogitsGemm(rows.in.padded_rows));
  });
}

int64_t SampledRecomputedPath::BlockRows(const ChunkPlan& plan, int64_t rows) const {
  return ChooseSampledRows(PlannedShapeOf(context_.config, context_.sizes), ElementsOf(plan), rows,
                           context_.sizes.arena_bytes);
}

// Only bf16: exponentials do not fit the range of fp16 (hopper::WhyNotFused). An fp16 chunk whose plan is
// fused computes fp32 logits here; its plan is for the exact gradients, which may follow.
bool SampledRecomputedPath::LeavesExponentials(const ChunkPlan& plan) const {
  return plan.fused() && context_.config.compute_dtype == DType::kBFloat16;
}

DType SampledRecomputedPath::ElementsOf(const ChunkPlan& plan) const {
  return LeavesExponentials(plan) ? context_.config.compute_dtype : DType::kFloat32;
}

SampleList SampledRecomputedPath::ListOf(const ChunkJob& job, const RowBlock& rows) const {
  const int64_t first = FirstEntry(job, rows.begin);
  const int64_t last = FirstEntry(job, std::min(rows.begin + rows.in.rows, job.rows()));
  const bool sampled = job.plan.sampled();
  return {.entries = buffers_.listed,
          .first = static_cast<int32_t>(first),
          .capacity = static_cast<int32_t>(last - first),
          .rows = buffers_.rows + rows.begin,
          .counters = buffers_.counters,
          .variance = (sampled ? merger_.variance(job) : job.variance) + rows.begin,
          .square = (sampled ? merger_.square(job) : job.square) + rows.begin};
}

absl::Status SampledRecomputedPath::Loss(const ChunkJob& job) {
  const cudaStream_t stream = context_.device->compute();
  LOSSD_RETURN_IF_ERROR(Await(*context_.download_idle, stream));  // the list lies where dx will be
  LOSSD_RETURN_IF_ERROR(Zero(buffers_.counters, sizeof(SampleCounters), stream));
  LOSSD_RETURN_IF_ERROR(Zero(buffers_.runs, sizeof(RunCounters), stream));
  LOSSD_RETURN_IF_ERROR(
      ForEachRowBlock(job, block_rows_, [&](const RowBlock& rows) { return SampleBlock(job, rows); }));
  if (job.plan.filters_elements) {
    LOSSD_RETURN_IF_ERROR(merger_.MergeDroppedMass(job));
    return merger_.DecideListed(job, buffers_.counters);
  }
  LOSSD_RETURN_IF_ERROR(merger_.MergeErrors(job));
  LOSSD_RETURN_IF_ERROR(DecideSampled(context_, job, buffers_.counters));
  // If the device decides that the chunk is exact, exact_.Gradients needs the rules of all rows. If the head
  // is split or rows have soft targets, BlockElements has written them already. Otherwise exact_.Statistics
  // computes the logits once more and writes them.
  if (context_.sizes.is_split() || job.terms.soft) return absl::OkStatus();
  return BranchByDecision(
      context_, job, *job.loss_branch, [&] { return exact_.Statistics(job, /*selects=*/false); },
      [] { return absl::OkStatus(); });
}

// There are four ways to ds of a block, in this order in the function:
// - exponentials, if other devices have classes of the rows,
// - exponentials, if all classes are here,
// - ds over the fp32 logits, if other devices have classes of the rows or rows have soft targets,
// - ds over the fp32 logits otherwise.
absl::StatusOr<LogitMatrix> SampledRecomputedPath::BlockElements(const ChunkJob& job,
                                                                 const RowBlock& rows) const {
  Device& device = *context_.device;
  const SampledBlockArena arena = SampledBlockArena::Carve(ShapeOfHead(), ElementsOf(job.plan), block_rows_,
                                                           context_.memory[Region::kLogits]);
  const DType compute = context_.config.compute_dtype;
  if (LeavesExponentials(job.plan) && context_.sizes.is_split()) {
    LOSSD_RETURN_IF_ERROR(exact_.RowResultsAndExponentials(job, rows, arena.tiles, arena.elements));
    return LogitMatrix{arena.elements, compute, context_.sizes.padded_vocab, context_.sizes.vocab};
  }
  if (LeavesExponentials(job.plan)) {
    const hopper::FusedLossParams p = exact_.FusedLoss(job, rows, arena.tiles);
    LOSSD_RETURN_IF_CUDA_ERROR(
        hopper::LaunchFusedExponentials(p, arena.elements, device.limits().fused_clusters, device.compute()),
        "fused loss kernels");
    return LogitMatrix{arena.elements, compute, context_.sizes.padded_vocab, context_.sizes.vocab};
  }
  const LogitMatrix logits = exact_.LogitsAt(arena.elements);
  const LogitMatrix gradient = InPlaceOf(logits, compute);
  LOSSD_RETURN_IF_ERROR(exact_.ClassBlockLogits(job, rows, 0, logits));
  LOSSD_RETURN_IF_ERROR(top_.Select(job, rows, logits));
  if (context_.sizes.is_split() || job.terms.soft) {
    LOSSD_RETURN_IF_ERROR(exact_.RowResultsAndLogitGradient(job, rows, {logits, gradient, 0},
                                                            merger_.dropped_mass(job) + rows.begin));
    return gradient;
  }
  const RowLossParams loss = {logits, gradient, job.terms, rows.in, rows.out, !job.plan.uniform_apart};
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchRowLoss(loss, device.limits(), device.compute()), "row loss kernel");
  return gradient;
}

absl::Status SampledRecomputedPath::SampleBlock(const ChunkJob& job, const RowBlock& rows) const {
  const cudaStream_t stream = context_.device->compute();
  absl::StatusOr<LogitMatrix> elements = BlockElements(job, rows);
  if (!elements.ok()) return elements.status();
  // Each block has a level of its own; only `highest`, the last member, goes on over all blocks of the chunk.
  LOSSD_RETURN_IF_ERROR(Zero(buffers_.counters, offsetof(SampleCounters, highest), stream));
  const SampleRowsParams sample = {.elements = *elements,
                                   .factors = LeavesExponentials(job.plan) ? exact_.factors() : nullptr,
                                   .terms = job.terms,
                                   .in = rows.in,
                                   .lse = rows.out.lse,
                                   .target_logprob = rows.out.target_logprob,
                                   .omega = job.omega + rows.begin,
                                   .with_gradient = job.with_gradient + rows.begin,
                                   .threshold = ThresholdOf(job),
                                   .list = ListOf(job, rows)};
  if (job.plan.sampled()) return merger_.Sample(sample);
  return ToStatus(LaunchSampleRows(sample, stream), "selection kernels");
}

// As SampledStoredPath::GatherRows, without hot classes. The last block has been sampled, so the arena is
// free.
absl::Status SampledRecomputedPath::GatherRows(const ChunkJob& job) const {
  const cudaStream_t stream = context_.device->compute();
  const int64_t entries = ShapeOf(job).entries();
  LOSSD_RETURN_IF_CUDA_ERROR(
      cudaMemcpyAsync(buffers_.entries, buffers_.listed, static_cast<size_t>(entries) * sizeof(SampleEntry),
                      cudaMemcpyDeviceToDevice, stream),
      "cudaMemcpyAsync");
  const SampleList list = {.entries = buffers_.entries, .rows = buffers_.rows};
  SampledHiddenParams p = HiddenParamsOf(context_, job, list, job.in, 0);
  if (job.plan.uniform_apart && job.wants_hidden_gradient) {
    LOSSD_RETURN_IF_ERROR(SumWeights(context_, job, buffers_.kept));
    p.weight_sum = buffers_.kept.weight_sum;
  }
  if (job.layout.accumulate) {
    LOSSD_RETURN_IF_ERROR(ClearEntries(context_, buffers_.kept, entries));
    p.accumulate = job.accumulate;
    p.kept = {buffers_.kept.keys, buffers_.kept.coefs, nullptr, RowBits(job.rows()), 0};
  }
  return ToStatus(LaunchSampledHidden(p, stream), "sampled gradient kernel");
}

absl::Status SampledRecomputedPath::WeightGradient(const ChunkJob& job) {
  return job.wants_hidden_gradient ? absl::OkStatus() : Gradients(job);
}

absl::Status SampledRecomputedPath::Gradients(const ChunkJob& job) const {
  LOSSD_RETURN_IF_ERROR(BranchByDecision(
      context_, job, *job.weight_branch, [&] { return exact_.Gradients(job); },
      [&] { return SampledGradients(job); }));
  if (job.layout.accumulate) context_.accumulators->weight_is_zero = false;
  return absl::OkStatus();
}

absl::Status SampledRecomputedPath::SampledGradients(const ChunkJob& job) const {
  LOSSD_RETURN_IF_ERROR(GatherRows(job));
  if (!job.layout.accumulate) return absl::OkStatus();
  LOSSD_RETURN_IF_ERROR(ZeroDroppedHidden(context_, job));
  LOSSD_RETURN_IF_ERROR(AddEntries(context_, job, buffers_.kept, ShapeOf(job).entries(), buffers_.runs));
  return job.plan.uniform_apart ? AddUniform(context_, job, buffers_.kept) : absl::OkStatus();
}

std::vector<Choice> SampledRecomputedPath::DescribeMemory(const ChunkPlan& plan) const {
  const FilterShape shape = ShapeOfHead();
  const absl::string_view reason = WhyNotSampledOnDevice(shape, context_.device->limits());
  return {{.what = "sampled gradients",
           .choice = reason.empty()
                         ? absl::StrCat("from the logits of ", BlockRows(plan, context_.sizes.chunk_rows),
                                        " rows, up to ", kPooledRecomputed, " classes a row on average")
                         : "never",
           .reason = std::string(reason)}};
}

}  // namespace lossd::kernels::cuda
