// SPDX-License-Identifier: Apache-2.0
// RecomputedPath, and DistilledRecomputedPath for chunks with a teacher (recomputed_path.h).
//
// The arena (RecomputedArena) holds one block: the logits of some rows and classes, and then their gradient.
// The statistics of a row over the blocks of classes so far are its RunningRow. When all classes are known,
// they become the row's results and its rule (GradientRule: what its gradient needs besides its logits).
// Rules stay in Region::kRules until the gradients are computed.
#include "kernels/cuda/paths/recomputed_path.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/device/device_memory.h"
#include "kernels/cuda/kernels/rows.h"
#include "kernels/cuda/kernels/tensor_ops.h"
#include "kernels/cuda/paths/path_steps.h"

namespace lossd::kernels::cuda {

absl::Status ForEachBlock(int64_t end, int64_t block, int64_t limit,
                          absl::FunctionRef<absl::Status(int64_t, int64_t)> step) {
  for (int64_t begin = 0; begin < end; begin += block) {
    LOSSD_RETURN_IF_ERROR(step(begin, std::min(block, limit - begin)));
  }
  return absl::OkStatus();
}

absl::Status ForEachRowBlock(const ChunkJob& job, int64_t block_rows,
                             absl::FunctionRef<absl::Status(const RowBlock&)> step) {
  return ForEachBlock(job.rows(), block_rows, job.padded_rows(), [&](int64_t begin, int64_t count) {
    return step({begin, job.in.Block(begin, count), job.out.From(begin)});
  });
}

RecomputedPath::RecomputedPath(const PathContext& context)
    : context_(context),
      shapes_{context.sizes.padded_hidden, context.config.compute_dtype, /*scratch=*/false},
      shape_(RecomputedShapeOf(context.config, context.sizes, context.device->limits().multiprocessors)),
      merger_(context),
      top_(context),
      soft_(context) {
  Carver rows(context.memory[Region::kFusedRows]);
  fused_rows_ = hopper::FusedRows::Carve(rows, context.sizes.chunk_rows);
  merger_.UseIn(fused_rows_);
}

RecomputedBlocks RecomputedPath::ChooseBlocks(const ChunkPlan& plan, int64_t padded_rows) const {
  const RecomputedShape shape = shape_.For(plan.fused());
  return context_.device->options().smallest_blocks
             ? SmallestRecomputedBlocks(shape)
             : ChooseRecomputedBlocks(shape, padded_rows, context_.sizes.arena_bytes);
}

RecomputedArena RecomputedPath::Arena(const ChunkJob& job) const {
  return RecomputedArena::Carve(shape_.For(job.plan.fused()), blocks_, context_.memory[Region::kLogits]);
}

uint8_t* RecomputedPath::HiddenRows(const ChunkJob& job, const RowBlock& rows) const {
  return static_cast<uint8_t*>(job.hidden) +
         rows.begin * context_.sizes.padded_hidden * context_.sizes.element;
}

const uint8_t* RecomputedPath::WeightRows(int64_t first_class) const {
  return static_cast<const uint8_t*>(context_.weight()) +
         first_class * context_.sizes.padded_hidden * context_.sizes.element;
}

// After the logit pass there are no logits in memory, and the rows of the gradient are packed without gaps.
ClassBlock RecomputedPath::ClassesOf(const ChunkPlan& plan, int64_t first_class, int64_t padded_classes,
                                     void* data) const {
  const DType compute = context_.config.compute_dtype;
  const int64_t classes = std::min(padded_classes, context_.sizes.vocab - first_class);
  const LogitMatrix logits = {data, DType::kFloat32, padded_classes, classes};
  const LogitMatrix packed = {data, compute, padded_classes, classes};
  return {logits, plan.fused() ? packed : InPlaceOf(logits, compute), first_class};
}

GemmShape RecomputedPath::HiddenGemm(const ChunkPlan& plan, int64_t rows, int64_t classes) const {
  return shapes_.HiddenGradient(rows, classes, ClassesOf(plan, 0, classes, nullptr).gradient.ld,
                                DType::kFloat32);
}

GemmShape RecomputedPath::WeightGemm(const ChunkPlan& plan, int64_t rows, int64_t classes) const {
  return shapes_.WeightGradient(rows, classes, ClassesOf(plan, 0, classes, nullptr).gradient.ld);
}

absl::Status RecomputedPath::Prepare(const ChunkJob& job) {
  blocks_ = ChooseBlocks(job.plan, job.padded_rows());
  Gemms& gemms = context_.device->gemms();
  const auto prepare = [&](int64_t rows, int64_t classes) -> absl::Status {
    if (!job.plan.fused()) LOSSD_RETURN_IF_ERROR(gemms.Prepare(shapes_.Logits(rows, classes)));
    LOSSD_RETURN_IF_ERROR(gemms.Prepare(HiddenGemm(job.plan, rows, classes)));
    return gemms.Prepare(WeightGemm(job.plan, rows, classes));
  };
  const int64_t rows = job.padded_rows();
  return ForEachBlock(rows, blocks_.rows, rows, [&](int64_t, int64_t count) {
    return ForEachClassBlock([&](int64_t, int64_t classes) { return prepare(count, classes); });
  });
}

// The last block also has classes, because the size of a block is a multiple of the unit to which classes are
// padded. Only if the part has no classes at all, its one block has none.
absl::Status RecomputedPath::ForEachClassBlock(
    absl::FunctionRef<absl::Status(int64_t first, int64_t padded_classes)> step) const {
  const int64_t end = context_.sizes.padded_vocab;
  return ForEachBlock(end, blocks_.classes, end, step);
}

// ---- the loss ----

absl::Status RecomputedPath::Loss(const ChunkJob& job) {
  if (job.layout.top_k > 0) {
    LOSSD_RETURN_IF_ERROR(Await(*context_.download_idle, context_.device->compute()));  // TopSelector
  }
  return Statistics(job, /*selects=*/true);
}

// With a fused plan, `selects` changes nothing: the plan is fused only if no slice wants top classes
// (PlanChunk).
absl::Status RecomputedPath::Statistics(const ChunkJob& job, bool selects) const {
  return ForEachRowBlock(job, blocks_.rows,
                         [&](const RowBlock& rows) { return RowBlockStatistics(job, rows, selects); });
}

absl::Status RecomputedPath::RowBlockStatistics(const ChunkJob& job, const RowBlock& rows,
                                                bool selects) const {
  const cudaStream_t stream = context_.device->compute();
  const RecomputedArena arena = Arena(job);
  if (job.plan.fused()) {
    const hopper::FusedLossParams p = FusedLoss(job, rows, arena.tiles);
    const int clusters = context_.device->limits().fused_clusters;
    LOSSD_RETURN_IF_CUDA_ERROR(hopper::LaunchFusedSums(p, nullptr, clusters, stream), "fused loss kernels");
    LOSSD_RETURN_IF_ERROR(merger_.Merge(job.terms, rows.in, p.rows));
    return ToStatus(hopper::LaunchFusedFinish(p, nullptr, Rules(rows), stream), "fused loss kernels");
  }
  auto* const running = context_.memory.At<RunningRow>(Region::kRunningRows);
  const auto fold = [&](int64_t first, int64_t classes) -> absl::Status {
    const ClassBlock block = ClassesOf(job.plan, first, classes, arena.logits);
    LOSSD_RETURN_IF_ERROR(ClassBlockLogits(job, rows, first, block.logits));
    const bool last = first + classes >= context_.sizes.padded_vocab;
    if (selects) LOSSD_RETURN_IF_ERROR(top_.Select(job, rows, block.logits, first, last));
    LOSSD_RETURN_IF_ERROR(soft_.ExtractNamed(job, rows, block));
    return ToStatus(LaunchFoldBlock(block, job.terms, rows.in, running, stream), "statistics kernel");
  };
  LOSSD_RETURN_IF_ERROR(ForEachClassBlock(fold));
  LOSSD_RETURN_IF_ERROR(merger_.Merge(job.terms, rows.in, running));
  LOSSD_RETURN_IF_ERROR(soft_.SummariseNamed(job, rows));
  return ToStatus(LaunchFinishRunning(job.terms, rows.in, context_.config.compute_dtype, rows.out, running,
                                      Rules(rows), /*with_uniform=*/true, stream),
                  "row results kernel");
}

absl::Status RecomputedPath::RowResultsAndLogitGradient(const ChunkJob& job, const RowBlock& rows,
                                                        const ClassBlock& block, float* dropped_mass) const {
  const cudaStream_t stream = context_.device->compute();
  auto* const running = context_.memory.At<RunningRow>(Region::kRunningRows);
  GradientRule* const rules = Rules(rows);
  const bool with_uniform =
      job.plan.filters_elements || !job.plan.uniform_apart;  // exact gradients may need the uniform part
  LOSSD_RETURN_IF_ERROR(soft_.ExtractNamed(job, rows, block));
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchFoldBlock(block, job.terms, rows.in, running, stream),
                             "statistics kernel");
  LOSSD_RETURN_IF_ERROR(merger_.Merge(job.terms, rows.in, running));
  LOSSD_RETURN_IF_ERROR(soft_.SummariseNamed(job, rows));
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchFinishRunning(job.terms, rows.in, context_.config.compute_dtype, rows.out,
                                                 running, rules, with_uniform, stream),
                             "row results kernel");
  return WriteBlockGradient(context_, soft_, job, rows, block, rules, dropped_mass);
}

absl::Status RecomputedPath::RowResultsAndExponentials(const ChunkJob& job, const RowBlock& rows,
                                                       const hopper::TilePartials& tiles,
                                                       void* exponentials) const {
  const cudaStream_t stream = context_.device->compute();
  const hopper::FusedLossParams p = FusedLoss(job, rows, tiles);
  LOSSD_RETURN_IF_CUDA_ERROR(
      hopper::LaunchFusedSums(p, exponentials, context_.device->limits().fused_clusters, stream),
      "fused loss kernels");
  LOSSD_RETURN_IF_ERROR(merger_.Merge(job.terms, rows.in, p.rows));
  // One call writes either rules or exponentials. The rules are for the exact gradients, if the device
  // decides for them; the exponentials are needed now.
  LOSSD_RETURN_IF_CUDA_ERROR(hopper::LaunchFusedFinish(p, nullptr, Rules(rows), stream),
                             "fused loss kernels");
  return ToStatus(hopper::LaunchFusedFinish(p, exponentials, nullptr, stream), "fused loss kernels");
}

hopper::FusedLossParams RecomputedPath::FusedLoss(const ChunkJob& job, const RowBlock& rows,
                                                  const hopper::TilePartials& tiles) const {
  hopper::FusedRows fused_rows = fused_rows_;
  fused_rows.partials = tiles;
  return {.operands = {HiddenRows(job, rows), context_.weight(), context_.config.compute_dtype,
                       context_.sizes.padded_hidden, context_.sizes.padded_vocab},
          .terms = job.terms,
          .in = rows.in,
          .out = rows.out,
          .rows = fused_rows,
          .order = &context_.device->limits().cluster_order};
}

absl::Status RecomputedPath::ClassBlockLogits(const ChunkJob& job, const RowBlock& rows, int64_t first_class,
                                              const LogitMatrix& to) const {
  return context_.device->gemms().Run(
      shapes_.Logits(rows.in.padded_rows, to.ld),
      {.a = WeightRows(first_class), .b = HiddenRows(job, rows), .c = to.data}, nullptr,
      context_.device->compute());
}

// ---- the gradients ----

// Waits until the dx of the chunk before has left Region::kHiddenGradient.
absl::Status RecomputedPath::HiddenGradient(const ChunkJob& job) {
  LOSSD_RETURN_IF_ERROR(Await(*context_.download_idle, context_.device->compute()));
  LOSSD_RETURN_IF_ERROR(Gradients(job));
  if (job.layout.accumulate) context_.accumulators->weight_is_zero = false;
  return absl::OkStatus();
}

absl::Status RecomputedPath::WeightGradient(const ChunkJob& job) {
  // HiddenGradient has already added the weight gradient
  if (job.wants_hidden_gradient) return absl::OkStatus();
  LOSSD_RETURN_IF_ERROR(Gradients(job));
  context_.accumulators->weight_is_zero = false;
  return absl::OkStatus();
}

// First the rules of rows that must not be accumulated are cleared (LaunchSettleRules). So they add to no
// sum.
absl::Status RecomputedPath::Gradients(const ChunkJob& job) const {
  const int64_t ld = context_.sizes.padded_hidden;
  const SettleParams settle = {context_.memory.At<GradientRule>(Region::kRules),
                               {job.hidden, context_.config.compute_dtype, ld, ld},
                               job.rows(),
                               job.padded_rows(),
                               job.accumulate,
                               context_.keep};
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchSettleRules(settle, context_.device->compute()),
                             "kernel over hidden states");
  return ForEachRowBlock(job, blocks_.rows,
                         [&](const RowBlock& rows) { return RowBlockGradients(job, rows); });
}

// dx is summed over the blocks of classes in fp32. If dx is fp32 in its final place, it is summed there, else
// in the arena.
absl::Status RecomputedPath::RowBlockGradients(const ChunkJob& job, const RowBlock& rows) const {
  const RecomputedArena arena = Arena(job);
  const int64_t ld = context_.sizes.padded_hidden;
  const DType dtype = job.hidden_gradient_dtype;
  void* const dx =
      context_.memory[Region::kHiddenGradient] + rows.begin * ld * static_cast<int64_t>(SizeOf(dtype));
  void* const sums = dtype == DType::kFloat32 ? dx : arena.hidden_gradient;
  const auto add_block = [&](int64_t first, int64_t classes) -> absl::Status {
    const ClassBlock block = ClassesOf(job.plan, first, classes, arena.logits);
    LOSSD_RETURN_IF_ERROR(ClassBlockGradient(job, rows, block));
    if (job.wants_hidden_gradient) LOSSD_RETURN_IF_ERROR(AddHiddenGradient(job, rows, block, sums));
    return job.layout.accumulate ? AddWeightGradient(job, rows, block) : absl::OkStatus();
  };
  LOSSD_RETURN_IF_ERROR(ForEachClassBlock(add_block));
  if (!job.wants_hidden_gradient || sums == dx) return absl::OkStatus();
  return ToStatus(LaunchConvert({sums, DType::kFloat32, ld, ld}, {dx, dtype, ld, ld}, rows.in.rows,
                                context_.device->compute()),
                  "convert kernel");
}

// Computes ds of the block, divided by (gradient unit * logit scale).
absl::Status RecomputedPath::ClassBlockGradient(const ChunkJob& job, const RowBlock& rows,
                                                const ClassBlock& block) const {
  const cudaStream_t stream = context_.device->compute();
  if (job.plan.fused()) {
    const hopper::FusedGradientParams p = {
        .operands = {HiddenRows(job, rows), WeightRows(block.first_class), block.gradient.dtype,
                     context_.sizes.padded_hidden, block.gradient.ld},
        .terms = job.terms,
        .in = rows.in,
        .rules = Rules(rows),
        .first_class = block.first_class,
        .classes = block.gradient.classes,
        .gradient = block.gradient.data};
    return ToStatus(hopper::LaunchFusedGradient(p, context_.device->limits().fused_clusters, stream),
                    "logit pass");
  }
  LOSSD_RETURN_IF_ERROR(ClassBlockLogits(job, rows, block.first_class, block.logits));
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchGradientBlock(block, job.terms, rows.in, Rules(rows), stream),
                             "gradient kernel");
  return soft_.Write(job, rows, block, Rules(rows));
}

absl::Status RecomputedPath::AddHiddenGradient(const ChunkJob& job, const RowBlock& rows,
                                               const ClassBlock& block, void* sums) const {
  return context_.device->gemms().Run(HiddenGemm(job.plan, rows.in.padded_rows, block.logits.ld),
                                      {.a = WeightRows(block.first_class),
                                       .b = block.gradient.data,
                                       .c = sums,
                                       .alpha = job.hidden_gradient_scale,
                                       .beta = block.first_class == 0 ? 0.0f : 1.0f},
                                      nullptr, context_.device->compute());
}

// The first block of rows overwrites dW if dW is zero (beta 0); each later block adds to it.
absl::Status RecomputedPath::AddWeightGradient(const ChunkJob& job, const RowBlock& rows,
                                               const ClassBlock& block) const {
  const cudaStream_t stream = context_.device->compute();
  const WeightAccumulators& to = *context_.accumulators;
  const int32_t* const keep = context_.keep + rows.begin;
  const DeviceMatrix gradient = {block.gradient.data, block.gradient.dtype, block.gradient.classes,
                                 block.gradient.ld};
  if (!job.layout.accumulate_all) {
    LOSSD_RETURN_IF_CUDA_ERROR(LaunchZeroDroppedRows(gradient, keep, rows.in.rows, stream),
                               "kernel over a gradient");
  }
  if (to.bias != nullptr) {
    LOSSD_RETURN_IF_CUDA_ERROR(
        LaunchColumnSum(gradient, keep, nullptr, rows.in.rows, job.weight_gradient_scale, Arena(job).partials,
                        to.bias + block.first_class, stream),
        "column sum kernel");
  }
  return context_.device->gemms().Run(WeightGemm(job.plan, rows.in.padded_rows, block.logits.ld),
                                      {.a = HiddenRows(job, rows),
                                       .b = block.gradient.data,
                                       .c = to.weight + block.first_class * context_.sizes.padded_hidden,
                                       .alpha = job.weight_gradient_scale,
                                       .beta = to.weight_is_zero && rows.begin == 0 ? 0.0f : 1.0f},
                                      nullptr, stream);
}

absl::StatusOr<std::vector<Choice>> RecomputedPath::Describe(const ChunkPlan& plan) {
  Gemms& gemms = context_.device->gemms();
  const RecomputedBlocks blocks =
      ChooseRecomputedBlocks(shape_.For(plan.fused()), context_.sizes.chunk_rows, context_.sizes.arena_bytes);
  std::vector<Choice> choices = cuda::Describe(plan);
  choices.insert(choices.begin(), DescribeBlocks(blocks, context_.sizes.arena_bytes));
  if (plan.fused()) {
    choices.push_back(FusedLogitsChoice(context_.device->limits()));
  } else {
    LOSSD_RETURN_IF_ERROR(
        DescribeGemm(gemms, "logits product", shapes_.Logits(blocks.rows, blocks.classes), choices));
  }
  LOSSD_RETURN_IF_ERROR(
      DescribeGemm(gemms, "hidden gradient product", HiddenGemm(plan, blocks.rows, blocks.classes), choices));
  if (!context_.config.trainable) return choices;
  LOSSD_RETURN_IF_ERROR(
      DescribeGemm(gemms, "weight gradient product", WeightGemm(plan, blocks.rows, blocks.classes), choices));
  return choices;
}

// ---- with a teacher ----

namespace {

constexpr int64_t kResultBytes = 7 * sizeof(float);  // of a row: its RowResults, and its divergence
constexpr int64_t kSlack = 4096;                     // for the rounding of the carver

}  // namespace

int64_t DistilledRecomputedPath::BlockRows(const HeadSizes& sizes, int64_t teacher_rows) {
  const int64_t logits = sizes.planned_vocab() * static_cast<int64_t>(sizeof(float));
  const int64_t row = 2 * logits + sizes.planned_vocab() * sizes.element + kResultBytes;
  return std::max<int64_t>(0, teacher_rows * logits - kSlack) / row / 8 * 8;
}

DistilledRecomputedPath::Room DistilledRecomputedPath::Room::Carve(const PathContext& context,
                                                                   const TeacherRows& teacher) {
  const HeadSizes& sizes = context.sizes;
  Room room;
  room.rows = BlockRows(sizes, teacher.block_rows);
  const int64_t elements = room.rows * sizes.planned_vocab();
  Carver carver(reinterpret_cast<uint8_t*>(teacher.logits));
  carver.Take<float>(elements);  // the teacher's logits
  room.logits = carver.Take<float>(elements);
  room.gradient = {carver.Take<uint8_t>(elements * sizes.element), context.config.compute_dtype,
                   sizes.padded_vocab, sizes.vocab};
  room.results = {carver.Take<float>(room.rows), carver.Take<float>(room.rows),
                  carver.Take<float>(room.rows), carver.Take<float>(room.rows),
                  carver.Take<float>(room.rows), carver.Take<int32_t>(room.rows)};
  room.divergence = carver.Take<float>(room.rows);
  return room;
}

DistilledRecomputedPath::DistilledRecomputedPath(const PathContext& context)
    : context_(context),
      shapes_{context.sizes.padded_hidden, context.config.compute_dtype, /*scratch=*/false},
      staged_(context),
      stored_(context),
      top_(context),
      shape_(RecomputedShapeOf(context.config, context.sizes, context.device->limits().multiprocessors)
                 .For(/*fused=*/false)) {}

absl::Status DistilledRecomputedPath::Prepare(const ChunkJob& job) {
  Gemms& gemms = context_.device->gemms();
  const TeacherRows& teacher = *job.teacher;
  const int64_t rows = job.padded_rows(), vocab = context_.sizes.padded_vocab;
  const GemmShapes logits = {context_.sizes.padded_hidden, context_.config.compute_dtype};
  const auto prepare = [&](int64_t, int64_t count) -> absl::Status {
    LOSSD_RETURN_IF_ERROR(gemms.Prepare(logits.Logits(count, vocab)));
    LOSSD_RETURN_IF_ERROR(gemms.Prepare(teacher.shapes.Logits(count, teacher.padded_vocab)));
    if (!job.wants_gradient()) return absl::OkStatus();
    LOSSD_RETURN_IF_ERROR(gemms.Prepare(shapes_.HiddenGradient(count, vocab, job.hidden_gradient_dtype)));
    return job.layout.accumulate ? gemms.Prepare(shapes_.WeightGradient(count, vocab)) : absl::OkStatus();
  };
  return cuda::ForEachBlock(rows, BlockRows(context_.sizes, teacher.block_rows), rows, prepare);
}

absl::Status DistilledRecomputedPath::ForEachBlock(const ChunkJob& job, const Room& room,
                                                   StagedLogits::BlockStep step) const {
  return cuda::ForEachBlock(job.rows(), room.rows, job.padded_rows(), [&](int64_t begin, int64_t count) {
    return staged_.ComputeBlock(job, begin, count, room.logits, step);
  });
}

absl::Status DistilledRecomputedPath::Loss(const ChunkJob& job) {
  if (job.layout.top_k > 0) {
    LOSSD_RETURN_IF_ERROR(Await(*context_.download_idle, context_.device->compute()));  // TopSelector
  }
  const LogitMatrix none;
  return ForEachBlock(job, Room::Carve(context_, *job.teacher),
                      [&](const RowBlock& rows, const LogitMatrix& logits) -> absl::Status {
                        LOSSD_RETURN_IF_ERROR(top_.Select(job, rows, logits));
                        return stored_.Distil(job, rows, logits, none, job.divergence + rows.begin);
                      });
}

absl::Status DistilledRecomputedPath::HiddenGradient(const ChunkJob& job) {
  LOSSD_RETURN_IF_ERROR(Await(*context_.download_idle, context_.device->compute()));
  const Room room = Room::Carve(context_, *job.teacher);
  const auto step = [&](const RowBlock& rows, const LogitMatrix& logits) -> absl::Status {
    // The first pass has delivered the row results, and a copy of them to the host may be under way. So the
    // second pass writes its row results to scratch memory.
    RowBlock again = rows;
    again.out = room.results;
    LOSSD_RETURN_IF_ERROR(stored_.Distil(job, again, logits, room.gradient, room.divergence));
    return Gradients(job, rows, room.gradient);
  };
  LOSSD_RETURN_IF_ERROR(ForEachBlock(job, room, step));
  if (job.layout.accumulate) context_.accumulators->weight_is_zero = false;
  return absl::OkStatus();
}

absl::Status DistilledRecomputedPath::Gradients(const ChunkJob& job, const RowBlock& rows,
                                                const LogitMatrix& gradient) const {
  const cudaStream_t stream = context_.device->compute();
  Gemms& gemms = context_.device->gemms();
  const HeadSizes& sizes = context_.sizes;
  const DType dtype = job.hidden_gradient_dtype;
  const int64_t dx_begin = rows.begin * sizes.padded_hidden * static_cast<int64_t>(SizeOf(dtype));
  LOSSD_RETURN_IF_ERROR(gemms.Run(shapes_.HiddenGradient(rows.in.padded_rows, sizes.padded_vocab, dtype),
                                  {.a = context_.weight(),
                                   .b = gradient.data,
                                   .c = context_.memory[Region::kHiddenGradient] + dx_begin,
                                   .alpha = job.hidden_gradient_scale},
                                  nullptr, stream));
  if (!job.layout.accumulate) return absl::OkStatus();
  const DeviceMatrix elements = {gradient.data, gradient.dtype, gradient.classes, gradient.ld};
  LOSSD_RETURN_IF_CUDA_ERROR(
      LaunchZeroDroppedRows(elements, context_.keep + rows.begin, rows.in.rows, stream),
      "kernel over a gradient");
  const WeightAccumulators& to = *context_.accumulators;
  if (to.bias != nullptr) LOSSD_RETURN_IF_ERROR(AddBias(job, rows, gradient));
  const auto* const hidden = static_cast<const uint8_t*>(job.hidden);
  return gemms.Run(shapes_.WeightGradient(rows.in.padded_rows, sizes.padded_vocab),
                   {.a = hidden + rows.begin * sizes.padded_hidden * sizes.element,
                    .b = gradient.data,
                    .c = to.weight,
                    .alpha = job.weight_gradient_scale,
                    .beta = to.weight_is_zero && rows.begin == 0 ? 0.0f : 1.0f},
                   nullptr, stream);
}

// Uses the head's own arena for the partial sums, one block of classes after the other. The arena is free,
// because the logits of this path lie in the teacher's memory.
absl::Status DistilledRecomputedPath::AddBias(const ChunkJob& job, const RowBlock& rows,
                                              const LogitMatrix& gradient) const {
  const RecomputedBlocks blocks =
      ChooseRecomputedBlocks(shape_, context_.sizes.chunk_rows, context_.sizes.arena_bytes);
  const RecomputedArena arena = RecomputedArena::Carve(shape_, blocks, context_.memory[Region::kLogits]);
  return cuda::ForEachBlock(
      gradient.classes, blocks.classes, gradient.classes, [&](int64_t first, int64_t classes) {
        const DeviceMatrix elements = {static_cast<uint8_t*>(gradient.data) + first * context_.sizes.element,
                                       gradient.dtype, classes, gradient.ld};
        return ToStatus(
            LaunchColumnSum(elements, nullptr, nullptr, rows.in.rows, job.weight_gradient_scale,
                            arena.partials, context_.accumulators->bias + first, context_.device->compute()),
            "column sum kernel");
      });
}

}  // namespace lossd::kernels::cuda
