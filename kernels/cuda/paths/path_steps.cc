// SPDX-License-Identifier: Apache-2.0
// Steps that several paths have in common (path_steps.h).
//
// An exchange of records between the parts of a split head has three steps. A kernel writes what this part
// knows of each row to `own`. ClassExchange::Gather copies `own` of every part to `all`, in the order of the
// parts. A kernel merges `all` in this order, so all parts get the same bits.
#include "kernels/cuda/paths/path_steps.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/kernels/rows.h"
#include "kernels/cuda/kernels/soft_rows.h"
#include "kernels/cuda/kernels/split_rows.h"
#include "kernels/cuda/paths/path_memory.h"

namespace lossd::kernels::cuda {

RowMerger::RowMerger(const PathContext& context)
    : context_(context), rows_(SplitRows::Carve(context.sizes, context.memory[Region::kSplitRows])) {}

void RowMerger::UseIn(hopper::FusedRows& rows) const {
  if (context_.sizes.is_split()) rows.sum_reference = rows_.sum_reference;
}

absl::Status RowMerger::Merge(const LossTerms& terms, const RowInputs& in,
                              const hopper::FusedRows& rows) const {
  if (!context_.sizes.is_split()) return absl::OkStatus();
  const cudaStream_t stream = context_.device->compute();
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchRecordRows(terms, in, rows, rows_.own, stream), "record kernel");
  LOSSD_RETURN_IF_ERROR(context_.link->exchange->Gather(rows_.own, rows_.all,
                                                        in.rows * static_cast<int64_t>(sizeof(RowRecord))));
  return ToStatus(LaunchMergeRows(terms, in, rows_.all, context_.sizes.parts, rows, stream), "merge kernel");
}

absl::Status RowMerger::Merge(const LossTerms& terms, const RowInputs& in, RunningRow* rows) const {
  if (!context_.sizes.is_split()) return absl::OkStatus();
  const cudaStream_t stream = context_.device->compute();
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchRecordRows(terms, in, rows, rows_.own, stream), "record kernel");
  LOSSD_RETURN_IF_ERROR(context_.link->exchange->Gather(rows_.own, rows_.all,
                                                        in.rows * static_cast<int64_t>(sizeof(RowRecord))));
  return ToStatus(LaunchMergeRows(terms, in, rows_.all, context_.sizes.parts, rows, stream), "merge kernel");
}

// A TaughtRecord is not larger than a RowRecord, so `all` has room for them.
absl::Status RowMerger::Merge(const DivergenceParams& p,
                              cudaError_t (*launch)(const MergeTaughtParams& params,
                                                    cudaStream_t stream)) const {
  if (!context_.sizes.is_split()) return absl::OkStatus();
  LOSSD_RETURN_IF_ERROR(context_.link->exchange->Gather(
      p.rows.records, rows_.all, p.in.rows * static_cast<int64_t>(sizeof(TaughtRecord))));
  const MergeTaughtParams merge = {.distillation = p.distillation,
                                   .all = reinterpret_cast<const TaughtRecord*>(rows_.all),
                                   .parts = context_.sizes.parts,
                                   .rows = p.in.rows,
                                   .records = p.rows.records};
  return ToStatus(launch(merge, context_.device->compute()), "merge kernel");
}

GradientMerger::GradientMerger(const PathContext& context)
    : context_(context), rows_(SplitRows::Carve(context.sizes, context.memory[Region::kSplitRows])) {}

float* GradientMerger::variance(const ChunkJob& job) const {
  return context_.sizes.is_split() ? rows_.own_sums : job.variance;
}

float* GradientMerger::square(const ChunkJob& job) const {
  return context_.sizes.is_split() ? rows_.own_sums + job.rows() : job.square;
}

// The list is written once at level 0, to count its entries, and again at the highest level of all parts,
// unless that level is 0 (LaunchSelectSamples in sampled.h).
absl::Status GradientMerger::Sample(const SampleRowsParams& params) const {
  const cudaStream_t stream = context_.device->compute();
  if (!context_.sizes.is_split()) return ToStatus(LaunchSampleRows(params, stream), "sampling kernels");
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchSelectSamples(params, /*again=*/false, stream), "sampling kernels");
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchChooseLevel(params, stream), "level kernels");
  SampleCounters* const counters = params.list.counters;
  LOSSD_RETURN_IF_ERROR(context_.link->exchange->Gather(&counters->level, rows_.levels,
                                                        static_cast<int64_t>(sizeof(counters->level))));
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchRaiseLevel(counters, rows_.levels, context_.sizes.parts, stream),
                             "level kernel");
  return ToStatus(LaunchSelectSamples(params, /*again=*/true, stream), "sampling kernels");
}

absl::Status GradientMerger::GatherSums(int64_t n) const {
  return context_.link->exchange->Gather(rows_.own_sums, rows_.all_sums,
                                         n * static_cast<int64_t>(sizeof(float)));
}

// own_sums has the variances of all rows and behind them the squares. Both are added up over the parts in one
// exchange, and the sums take the place of own_sums.
absl::Status GradientMerger::MergeErrors(const ChunkJob& job) const {
  if (!context_.sizes.is_split()) return absl::OkStatus();
  const int64_t rows = job.rows();
  const cudaStream_t stream = context_.device->compute();
  LOSSD_RETURN_IF_ERROR(GatherSums(2 * rows));
  LOSSD_RETURN_IF_CUDA_ERROR(
      LaunchAddParts(rows_.all_sums, context_.sizes.parts, 2 * rows, rows_.own_sums, stream),
      "kernel over parts");
  const auto copy = [&](float* to, const float* from) {
    return ToStatus(cudaMemcpyAsync(to, from, static_cast<size_t>(rows) * sizeof(float),
                                    cudaMemcpyDeviceToDevice, stream),
                    "cudaMemcpyAsync");
  };
  LOSSD_RETURN_IF_ERROR(copy(job.variance, rows_.own_sums));
  return copy(job.square, rows_.own_sums + rows);
}

absl::Status GradientMerger::MergeDroppedMass(const ChunkJob& job) const {
  if (!context_.sizes.is_split()) return absl::OkStatus();
  LOSSD_RETURN_IF_ERROR(GatherSums(job.rows()));
  return ToStatus(LaunchAddParts(rows_.all_sums, context_.sizes.parts, job.rows(), job.dropped_mass,
                                 context_.device->compute()),
                  "kernel over parts");
}

absl::Status GradientMerger::DecideListed(const ChunkJob& job, const SampleCounters* counters) const {
  const bool split = context_.sizes.is_split();
  if (split) {
    LOSSD_RETURN_IF_ERROR(context_.link->exchange->Gather(&counters->highest, rows_.levels,
                                                          static_cast<int64_t>(sizeof(counters->highest))));
  }
  const DecideListedParams p = {.levels = split ? rows_.levels : &counters->highest,
                                .parts = split ? context_.sizes.parts : 1,
                                .decision = job.decision,
                                .dropped_mass = job.dropped_mass,
                                .rows = job.rows()};
  return ToStatus(LaunchDecideListed(p, context_.device->compute()), "decision kernel");
}

// `running` holds the lists of the rows over the blocks of classes so far, in Region::kHiddenGradient. Each
// block but the first merges the list so far (`before`) with its own classes. The last block writes the
// result to job.classes, in pinned host memory.
absl::Status TopSelector::Select(const ChunkJob& job, const RowBlock& rows, const LogitMatrix& logits,
                                 int64_t first_class, bool last) const {
  const int k = job.layout.top_k;
  if (k == 0 || rows.in.rows == 0) return absl::OkStatus();
  static_assert(kMostSelected == kMostTopClasses);
  auto* const lists = context_.memory.At<float>(Region::kHiddenGradient);
  const int64_t entries = context_.sizes.chunk_rows * kMostTopClasses;
  const TopLists running = TopLists{lists, reinterpret_cast<int32_t*>(lists + entries)}.From(rows.begin * k);
  SelectTopParams p = {.logits = logits,
                       .first_class = first_class,
                       .terms = job.terms,
                       .compute = context_.config.compute_dtype,
                       .rows = rows.in.rows,
                       .k = k,
                       .top = running};
  if (first_class > 0) p.before = running;
  if (last && context_.sizes.is_split()) return Exchange(job, rows.begin, p);
  if (last) p.top = TopLists{job.classes.top_logits, job.classes.top_places}.From(rows.begin * k);
  return ToStatus(LaunchSelectTop(p, context_.device->compute()), "selection kernel");
}

absl::Status TopSelector::SelectOfExponentials(const ChunkJob& job, const void* exponentials) const {
  const SelectTopOfExponentialsParams p = {.exponentials = exponentials,
                                           .ld = context_.sizes.padded_vocab,
                                           .hidden = job.hidden,
                                           .weight = context_.weight(),
                                           .inner = context_.sizes.padded_hidden,
                                           .terms = job.terms,
                                           .targets = job.in.targets,
                                           .rows = job.in.rows,
                                           .k = job.layout.top_k,
                                           .top = {job.classes.top_logits, job.classes.top_places}};
  return ToStatus(LaunchSelectTopOfExponentials(p, context_.device->compute()), "selection kernel");
}

// The last block of classes of a split head: selects the lists of this part, gathers the lists of all parts,
// and merges them into job.classes. `piece`: as many rows at a time as the scratch memory has room for. A
// list has the logits of its rows, and behind them the numbers of their classes.
absl::Status TopSelector::Exchange(const ChunkJob& job, int64_t begin, const SelectTopParams& select) const {
  const cudaStream_t stream = context_.device->compute();
  const int k = select.k;
  const int64_t piece = kTopScratchEntries / k;
  for (int64_t first = 0; first < select.rows; first += piece) {
    SelectTopParams p = select;
    p.rows = std::min(piece, select.rows - first);
    const int64_t entries = p.rows * k;
    p.logits.data = static_cast<float*>(select.logits.data) + first * select.logits.ld;
    if (select.before.logits != nullptr) p.before = select.before.From(first * k);
    p.top = {scratch_.own, reinterpret_cast<int32_t*>(scratch_.own + entries)};
    LOSSD_RETURN_IF_CUDA_ERROR(LaunchSelectTop(p, stream), "selection kernel");
    LOSSD_RETURN_IF_ERROR(context_.link->exchange->Gather(
        scratch_.own, scratch_.all, entries * static_cast<int64_t>(sizeof(float) + sizeof(int32_t))));
    const MergeTopParams merge = {
        .all = {scratch_.all, reinterpret_cast<int32_t*>(scratch_.all + entries)},
        .stride = 2 * entries,
        .parts = context_.sizes.parts,
        .rows = p.rows,
        .k = k,
        .top = TopLists{job.classes.top_logits, job.classes.top_places}.From((begin + first) * k)};
    LOSSD_RETURN_IF_CUDA_ERROR(LaunchMergeTop(merge, stream), "merge kernel");
  }
  return absl::OkStatus();
}

absl::Status SoftSteps::ExtractNamed(const ChunkJob& job, const RowBlock& rows,
                                     const ClassBlock& block) const {
  if (!job.terms.soft) return absl::OkStatus();
  // If no path claims Region::kTargetDots, the head has not computed the targets' dot products. Then this
  // kernel takes them from the logits.
  const bool needs_dots = context_.memory[Region::kTargetDots] == nullptr;
  return ToStatus(LaunchTakeTargets(block, job.terms, rows.in, context_.config.compute_dtype,
                                    needs_dots ? job.classes.target_dots + rows.begin : nullptr,
                                    context_.device->compute()),
                  "soft target kernel");
}

absl::Status SoftSteps::SummariseNamed(const ChunkJob& job, const RowBlock& rows) const {
  if (!job.terms.soft || rows.in.rows == 0) return absl::OkStatus();
  if (context_.sizes.is_split()) {
    LOSSD_RETURN_IF_ERROR(Exchange(rows.in.soft.logits, rows.in.rows * rows.in.soft.count));
  }
  return ToStatus(
      LaunchNameRows(job.terms, rows.in, job.classes.named + rows.begin, context_.device->compute()),
      "soft target kernel");
}

// Each class is on one device; the other devices have 0 for its logit, so the sum over the devices is the
// logit. `logits` is pinned host memory, and an exchange needs device memory, so the logits take the way over
// `scratch`.
absl::Status SoftSteps::Exchange(float* logits, int64_t entries) const {
  float* const scratch = TopScratch::Carve(context_.sizes, context_.memory[Region::kTopClasses]).own;
  const cudaStream_t stream = context_.device->compute();
  for (int64_t first = 0; first < entries; first += kTopScratchEntries) {
    const int64_t n = std::min(kTopScratchEntries, entries - first);
    const int64_t bytes = n * static_cast<int64_t>(sizeof(float));
    LOSSD_RETURN_IF_ERROR(Copy(scratch, logits + first, bytes, stream));
    LOSSD_RETURN_IF_ERROR(context_.link->exchange->Sum(ExchangeKind::kRowStatistics, scratch, n));
    LOSSD_RETURN_IF_ERROR(Copy(logits + first, scratch, bytes, stream));
  }
  return absl::OkStatus();
}

absl::Status SoftSteps::Write(const ChunkJob& job, const RowBlock& rows, const ClassBlock& block,
                              const GradientRule* rules) const {
  if (!job.terms.soft) return absl::OkStatus();
  return ToStatus(LaunchWriteTargets(block, job.terms, rows.in, rows.out, rules, context_.device->compute()),
                  "soft target kernel");
}

absl::Status WriteBlockGradient(const PathContext& context, const SoftSteps& soft, const ChunkJob& job,
                                const RowBlock& rows, const ClassBlock& block, GradientRule* rules,
                                float* dropped_mass) {
  const cudaStream_t stream = context.device->compute();
  // The rules of padding rows have not been written.
  const int64_t padding = (rows.in.padded_rows - rows.in.rows) * static_cast<int64_t>(sizeof(GradientRule));
  if (padding > 0) LOSSD_RETURN_IF_ERROR(Zero(rules + rows.in.rows, padding, stream));
  if (job.plan.filters_elements) {
    const BlockFilter filter = {.epsilon = job.options().filter_epsilon,
                                .with_uniform = !job.plan.uniform_apart,
                                .with_gradient = job.with_gradient + rows.begin,
                                .dropped_mass = dropped_mass};
    LOSSD_RETURN_IF_CUDA_ERROR(LaunchFilteredBlock(block, job.terms, rows.in, rules, filter, stream),
                               "filter kernel");
  } else {
    LOSSD_RETURN_IF_CUDA_ERROR(LaunchGradientBlock(block, job.terms, rows.in, rules, stream),
                               "gradient kernel");
  }
  return soft.Write(job, rows, block, rules);
}

// Only kAuto has a limit for the predicted error; otherwise p.max_error stays infinite.
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
  p.weight = context.weight();
  p.ld = context.sizes.padded_hidden;
  if (!job.wants_hidden_gradient) return p;
  p.gradient_dtype = job.hidden_gradient_dtype;
  p.hidden_gradient =
      context.memory[Region::kHiddenGradient] + begin * p.ld * static_cast<int64_t>(SizeOf(p.gradient_dtype));
  p.gradient_scale = job.hidden_gradient_scale;
  return p;
}

bool FilterBackoff::Next(const LossOptions& options) {
  if (options != options_) *this = FilterBackoff();
  options_ = options;
  if (Paused() && ++without_trial_ < kFilterPatience) return false;
  without_trial_ = 0;
  return true;
}

void FilterBackoff::Note(const LossOptions& options, Decision decision) {
  // Later chunks may have had other options, and then the count is about those.
  if (options != options_) return;
  const bool exact = decision != Decision::kAsPlanned;
  exact_in_a_row_ = exact ? std::min(exact_in_a_row_ + 1, kFilterPatience) : 0;
}

absl::Status ZeroDroppedHidden(const PathContext& context, const ChunkJob& job) {
  const int64_t ld = context.sizes.padded_hidden;
  const DeviceMatrix hidden = {job.hidden, context.config.compute_dtype, ld, ld};
  return ToStatus(LaunchZeroDroppedRows(hidden, context.keep, job.rows(), context.device->compute()),
                  "kernel over hidden states");
}

absl::Status ClearEntries(const PathContext& context, const KeptBuffers& buffers, int64_t count) {
  return ToStatus(cudaMemsetAsync(buffers.keys, 0xff, static_cast<size_t>(count) * sizeof(uint64_t),
                                  context.device->compute()),
                  "cudaMemsetAsync");
}

absl::Status AddEntries(const PathContext& context, const ChunkJob& job, const KeptBuffers& buffers,
                        int64_t count, RunCounters* runs) {
  const cudaStream_t stream = context.device->compute();
  SortParams sort = {{buffers.keys, buffers.spare_keys},
                     {buffers.coefs, buffers.spare_coefs},
                     count,
                     KeyBits(job.rows(), context.sizes.vocab),
                     buffers.sort_scratch};
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchSortKept(sort, stream), "sort kernels");
  FilteredWeightParams p;
  p.keys = sort.keys[0];
  p.coefs = sort.coefs[0];
  p.count = count;
  p.row_bits = RowBits(job.rows());
  p.keep = context.keep;
  p.hidden = job.hidden;
  p.dtype = context.config.compute_dtype;
  p.ld = context.sizes.padded_hidden;
  p.scale = job.weight_gradient_scale;
  p.weight_gradient = context.accumulators->weight;
  p.bias_gradient = context.accumulators->bias;
  p.runs = buffers.runs;
  p.counters = runs;
  return ToStatus(LaunchFilteredWeight(p, context.device->limits().multiprocessors, stream),
                  "filtered weight kernels");
}

absl::Status SumWeights(const PathContext& context, const ChunkJob& job, const KeptBuffers& buffers) {
  const cudaStream_t stream = context.device->compute();
  const int64_t ld = context.sizes.padded_hidden;
  const DeviceMatrix weight = {const_cast<void*>(context.weight()), context.config.compute_dtype, ld, ld};
  LOSSD_RETURN_IF_ERROR(Zero(buffers.weight_sum, ld * static_cast<int64_t>(sizeof(float)), stream));
  return ToStatus(LaunchColumnSum(weight, nullptr, job.terms.class_weights, context.sizes.vocab, 1.0f,
                                  buffers.partials, buffers.weight_sum, stream),
                  "column sum kernel");
}

// With label smoothing alpha, ds of each class v has the part -c alpha u_v / V, where c is coef_loss of the
// row and u_v the class weight. So for each class v (x: hidden state, S: logit scale, sums over the rows that
// are kept):
//   dW_v -= unit S alpha / V u_v sum(c x),  db_v -= unit S alpha / V u_v sum(c).
absl::Status AddUniform(const PathContext& context, const ChunkJob& job, const KeptBuffers& buffers) {
  const cudaStream_t stream = context.device->compute();
  const int64_t ld = context.sizes.padded_hidden;
  const float* coefs = job.in.coef_loss;
  const DeviceMatrix hidden = {job.hidden, context.config.compute_dtype, ld, ld};
  LOSSD_RETURN_IF_ERROR(Zero(buffers.hidden_sum, ld * static_cast<int64_t>(sizeof(float)), stream));
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchColumnSum(hidden, context.keep, coefs, job.rows(), 1.0f, buffers.partials,
                                             buffers.hidden_sum, stream),
                             "column sum kernel");
  UniformWeightParams p;
  p.hidden_sum = buffers.hidden_sum;
  p.coefs = coefs;
  p.keep = context.keep;
  p.rows = job.rows();
  p.class_weights = job.terms.class_weights;
  p.vocab = context.sizes.vocab;
  p.ld = ld;
  p.scale = -job.layout.unit * job.terms.scale * job.terms.smoothing /
            static_cast<float>(context.sizes.all_classes);
  p.weight_gradient = context.accumulators->weight;
  p.bias_gradient = context.accumulators->bias;
  return ToStatus(LaunchUniformWeight(p, stream), "uniform weight kernels");
}

namespace {

// The shape of this chunk. It has the rows of the chunk, because the room for entries, and with it the cost
// of sorting, depends on their number.
FilterShape ChunkShapeOf(const PathContext& context, const ChunkJob& job) {
  FilterShape shape = FilterShapeOf(context.config, context.sizes);
  shape.chunk_rows = job.rows();
  return shape;
}

}  // namespace

absl::Status CandidateFilter::Begin(const ChunkJob& job) const {
  return Zero(buffers_.counters, sizeof(FilterCounters), context_.device->compute());
}

RowSelection CandidateFilter::Selection(const ChunkJob& job, int64_t begin) const {
  return {job.options().filter_epsilon, buffers_.pool,
          static_cast<int32_t>(ChunkShapeOf(context_, job).capacity()), &buffers_.counters->used,
          buffers_.rows + begin};
}

absl::Status CandidateFilter::Decide(const ChunkJob& job) const {
  const DecideParams p = {Selection(job, 0), job.decision};
  return ToStatus(LaunchDecide(p, context_.device->compute()), "decision kernel");
}

absl::Status CandidateFilter::PrepareRows(const ChunkJob& job) const {
  if (job.layout.accumulate) {
    LOSSD_RETURN_IF_ERROR(ClearEntries(context_, buffers_.kept, ChunkShapeOf(context_, job).entries()));
  }
  if (job.terms.smoothing == 0.0f || !job.wants_hidden_gradient) return absl::OkStatus();
  return SumWeights(context_, job, buffers_.kept);
}

// All pointers of p are to the rows from `begin` on.
absl::Status CandidateFilter::FilterRows(const ChunkJob& job, const RowInputs& in, const RowResults& out,
                                         int64_t begin) const {
  const int64_t ld = context_.sizes.padded_hidden;
  FilterRowsParams p;
  p.terms = job.terms;
  p.in = in;
  p.out = out;
  p.selection = Selection(job, begin);
  p.dtype = context_.config.compute_dtype;
  p.hidden = static_cast<const uint8_t*>(job.hidden) + begin * ld * context_.sizes.element;
  p.weight = context_.weight();
  p.ld = ld;
  if (job.wants_hidden_gradient) {
    p.gradient_dtype = job.hidden_gradient_dtype;
    p.hidden_gradient = context_.memory[Region::kHiddenGradient] +
                        begin * ld * static_cast<int64_t>(SizeOf(p.gradient_dtype));
    p.gradient_scale = job.hidden_gradient_scale;
    if (job.terms.smoothing > 0.0f) p.weight_sum = buffers_.kept.weight_sum;
  }
  p.with_gradient = job.with_gradient + begin;
  p.accumulate = job.accumulate + begin;
  p.dropped_mass = job.dropped_mass + begin;
  if (job.layout.accumulate) {
    p.kept = {buffers_.kept.keys, buffers_.kept.coefs, &buffers_.counters->kept, RowBits(job.rows()), begin};
  }
  return ToStatus(LaunchFilterRows(p, context_.device->compute()), "filter kernel");
}

absl::Status CandidateFilter::AddKept(const ChunkJob& job) const {
  LOSSD_RETURN_IF_ERROR(AddEntries(context_, job, buffers_.kept, ChunkShapeOf(context_, job).entries(),
                                   &buffers_.counters->runs));
  return job.terms.smoothing > 0.0f ? AddUniform(context_, job, buffers_.kept) : absl::OkStatus();
}

absl::Status ZeroDroppedMass(const ChunkJob& job, cudaStream_t stream) {
  return Zero(job.dropped_mass, job.rows() * static_cast<int64_t>(sizeof(float)), stream);
}

absl::Status BranchByDecision(const PathContext& context, const ChunkJob& job, DeviceBranch& branch,
                              absl::FunctionRef<absl::Status()> exact,
                              absl::FunctionRef<absl::Status()> planned) {
  if (job.plan.gradients == Gradients::kSampled) return planned();
  static_assert(static_cast<int32_t>(Decision::kAsPlanned) == 0, "what is not 0 is exact");
  return BranchByFlag(context, reinterpret_cast<const int32_t*>(job.decision), branch, exact, planned);
}

// host_branches (cuda_options.h) is for tools that cannot follow a branch on the device.
absl::Status BranchByFlag(const PathContext& context, const int32_t* flag, DeviceBranch& branch,
                          absl::FunctionRef<absl::Status()> if_set,
                          absl::FunctionRef<absl::Status()> if_not) {
  const cudaStream_t stream = context.device->compute();
  return context.device->options().host_branches ? BranchOnHost(flag, stream, if_set, if_not)
                                                 : branch.Enqueue(flag, stream, if_set, if_not);
}

absl::Status DescribeGemm(Gemms& gemms, absl::string_view what, const GemmShape& shape,
                          std::vector<Choice>& choices) {
  LOSSD_RETURN_IF_ERROR(gemms.Prepare(shape));
  choices.push_back(gemms.Describe(shape));
  choices.back().what = std::string(what);
  return absl::OkStatus();
}

Choice FusedLogitsChoice(const DeviceLimits& limits) {
  return {.what = "logits product",
          .choice = absl::StrCat("with the loss, ", limits.fused_clusters, " clusters")};
}

Choice FilterChoice(const PathContext& context) {
  const FilterShape shape = FilterShapeOf(context.config, context.sizes);
  Carver own(nullptr), lists(nullptr);
  FilterBuffers::Carve(shape, own, lists, lists);  // only `own` is reported
  const absl::string_view reason = WhyNotFilteredOnDevice(shape, context.device->limits());
  return {.what = "filtered gradients",
          .choice = reason.empty() ? "where asked for" : "never",
          .reason = std::string(reason),
          .workspace_bytes = own.used()};
}

}  // namespace lossd::kernels::cuda
