// SPDX-License-Identifier: Apache-2.0
// Products of gradients (LibraryGemms, OwnGemms), fp32 logits by blocks (StagedLogits), and the paths
// StoredPath and FusedStoredPath (stored_path.h).
//
// At the end of Loss, Region::kLogits holds ds, the matrix dL/ds of the chunk, in the compute dtype: from
// StoredPath as it is, from FusedStoredPath as exponentials and a factor for each row.
// Region::kHiddenGradient holds memory for the loss until then (fp32 logits of the last blocks, partial sums,
// or softmaxes), and dx afterwards. So a phase that writes to it first waits for download_idle: the dx of the
// chunk before may still be copied to the host.
#include "kernels/cuda/paths/stored_path.h"

#include <algorithm>

#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/kernels/distill_rows.h"
#include "kernels/cuda/kernels/hopper/fused_loss.h"
#include "kernels/cuda/kernels/hopper/gradient_gemm.h"
#include "kernels/cuda/kernels/row_loss.h"
#include "kernels/cuda/kernels/rows.h"
#include "kernels/cuda/paths/path_steps.h"

namespace lossd::kernels::cuda {

// The product of the weight gradient keeps its multiprocessors until it ends. While it runs, the trainer
// waits for a copy of the hidden gradient. If this copy is within the GPU, it is a kernel, which also needs
// multiprocessors. So this many clusters stay free for the copy. On an H200 an embedded trainer had the
// gradient of 8,192 rows (gemma2-2b) after 39 to 40 ms instead of 45 to 46, and the weight gradient took no
// longer.
constexpr int kClustersBesideWeightGradient = 1;

static_assert(hopper::kGradientGemmScratchBytes <= kGemmWorkspaceBytes);

LibraryGemms::LibraryGemms(const PathContext& context)
    : context_(context), shapes_{context.sizes.padded_hidden, context.config.compute_dtype} {}

absl::Status LibraryGemms::Prepare(const ChunkJob& job) const {
  Gemms& gemms = context_.device->gemms();
  const int64_t rows = job.padded_rows(), vocab = context_.sizes.padded_vocab;
  if (job.wants_hidden_gradient) {
    LOSSD_RETURN_IF_ERROR(gemms.Prepare(shapes_.HiddenGradient(rows, vocab, job.hidden_gradient_dtype)));
  }
  return job.layout.accumulate ? gemms.Prepare(shapes_.WeightGradient(rows, vocab)) : absl::OkStatus();
}

absl::Status LibraryGemms::HiddenGradient(const ChunkJob& job, const StoredGradient& gradient) const {
  Device& device = *context_.device;
  const DType dtype = job.hidden_gradient_dtype;
  const bool scaled = gradient.factors != nullptr;
  void* const dx = context_.memory[Region::kHiddenGradient];
  LOSSD_RETURN_IF_ERROR(
      device.gemms().Run(shapes_.HiddenGradient(job.padded_rows(), context_.sizes.padded_vocab, dtype),
                         {.a = context_.weight(),
                          .b = gradient.elements,
                          .c = dx,
                          .alpha = scaled ? 1.0f : job.hidden_gradient_scale},
                         device.gemm_workspace(), device.compute()));
  if (!scaled) return absl::OkStatus();
  const int64_t ld = context_.sizes.padded_hidden;
  return ToStatus(LaunchScaleRows({dx, dtype, ld, ld}, gradient.factors, job.hidden_gradient_scale, nullptr,
                                  job.rows(), device.compute()),
                  "scale kernel");
}

absl::Status LibraryGemms::WeightGradient(const ChunkJob& job, const void* elements) const {
  Device& device = *context_.device;
  const WeightAccumulators& to = *context_.accumulators;
  return device.gemms().Run(shapes_.WeightGradient(job.padded_rows(), context_.sizes.padded_vocab),
                            {.a = job.hidden,
                             .b = elements,
                             .c = to.weight,
                             .alpha = job.weight_gradient_scale,
                             .beta = to.weight_is_zero ? 0.0f : 1.0f},
                            device.gemm_workspace(), device.compute());
}

absl::Status LibraryGemms::Describe(std::vector<Choice>& choices) const {
  Gemms& gemms = context_.device->gemms();
  const HeadSizes& sizes = context_.sizes;
  LOSSD_RETURN_IF_ERROR(DescribeGemm(
      gemms, "hidden gradient product",
      shapes_.HiddenGradient(sizes.chunk_rows, sizes.padded_vocab, context_.config.compute_dtype), choices));
  if (!context_.config.trainable) return absl::OkStatus();
  return DescribeGemm(gemms, "weight gradient product",
                      shapes_.WeightGradient(sizes.chunk_rows, sizes.padded_vocab), choices);
}

absl::Status OwnGemms::HiddenGradient(const ChunkJob& job, const StoredGradient& gradient) const {
  return Run({.a = gradient.elements,
              .b = context_.weight(),
              .c = context_.memory[Region::kHiddenGradient],
              .output = job.hidden_gradient_dtype,
              .rows = job.rows(),
              .inner = context_.sizes.padded_vocab,
              .scale = job.hidden_gradient_scale,
              .factors = gradient.factors},
             context_.device->limits().fused_clusters);
}

absl::Status OwnGemms::WeightGradient(const ChunkJob& job, const void* elements) const {
  return Run({.transpose_a = true,
              .a = elements,
              .b = job.hidden,
              .c = context_.accumulators->weight,
              .output = DType::kFloat32,
              .add = !context_.accumulators->weight_is_zero,
              .rows = context_.sizes.padded_vocab,
              .inner = job.rows(),
              .scale = job.weight_gradient_scale},
             std::max(1, context_.device->limits().fused_clusters - kClustersBesideWeightGradient));
}

// Fills in the parameters that both products share.
absl::Status OwnGemms::Run(hopper::GradientGemmParams product, int clusters) const {
  Device& device = *context_.device;
  product.input = context_.config.compute_dtype;
  product.columns = context_.sizes.padded_hidden;
  product.scratch = device.gemm_workspace();
  product.order = &device.limits().cluster_order;
  const hopper::GradientGemmPlan plan =
      hopper::PlanGradientGemm(product.rows, product.columns, product.inner, clusters);
  return ToStatus(hopper::LaunchGradientGemm(product, plan, device.compute()), "product kernel");
}

const GradientGemms& StoredGradients::GemmsOf(const ChunkPlan& plan) const {
  if (plan.own_gemms()) return own_;
  return library_;
}

absl::Status StoredGradients::HiddenGradient(const ChunkJob& job, const StoredGradient& gradient) const {
  return GemmsOf(job.plan).HiddenGradient(job, gradient);
}

absl::Status StoredGradients::WeightGradient(const ChunkJob& job, const StoredGradient& gradient) const {
  if (float* const bias = context_.accumulators->bias; bias != nullptr) {
    const HeadSizes& sizes = context_.sizes;
    const DeviceMatrix elements = {gradient.elements, context_.config.compute_dtype, sizes.vocab,
                                   sizes.padded_vocab};
    LOSSD_RETURN_IF_CUDA_ERROR(
        LaunchColumnSum(elements, context_.keep, gradient.factors, job.rows(), job.weight_gradient_scale,
                        context_.memory.At<float>(Region::kColumnSums), bias, context_.device->compute()),
        "column sum kernel");
  }
  return GemmsOf(job.plan).WeightGradient(job, gradient.elements);
}

StagedLogits::StagedLogits(const PathContext& context)
    : context_(context), shapes_{context.sizes.padded_hidden, context.config.compute_dtype} {}

absl::Status StagedLogits::Prepare(const ChunkJob& job, Kept kept) const {
  for (const StagedBlock& block : Blocks(job.padded_rows(), kept)) {
    LOSSD_RETURN_IF_ERROR(
        context_.device->gemms().Prepare(shapes_.Logits(block.rows, context_.sizes.padded_vocab)));
  }
  return absl::OkStatus();
}

std::vector<int64_t> StagedLogits::BlockRows(const ChunkJob& job, Kept kept) const {
  std::vector<int64_t> rows;
  for (const StagedBlock& block : Blocks(job.padded_rows(), kept)) rows.push_back(block.rows);
  return rows;
}

bool StagedLogits::UsesSpare(const ChunkJob& job, Kept kept) const {
  const std::vector<StagedBlock> blocks = Blocks(job.padded_rows(), kept);
  return std::any_of(blocks.begin(), blocks.end(), [](const StagedBlock& block) { return block.in_spare; });
}

absl::Status StagedLogits::ForEachBlock(const ChunkJob& job, Kept kept, BlockStep step) const {
  for (const StagedBlock& block : Blocks(job.padded_rows(), kept)) {
    LOSSD_RETURN_IF_ERROR(ComputeBlock(job, block.begin, block.rows, At(block), step));
  }
  return absl::OkStatus();
}

absl::Status StagedLogits::ComputeBlock(const ChunkJob& job, int64_t begin, int64_t count, void* at,
                                        BlockStep step) const {
  Device& device = *context_.device;
  const HeadSizes& sizes = context_.sizes;
  const auto* const hidden = static_cast<const uint8_t*>(job.hidden);
  const RowBlock rows = {begin, job.in.Block(begin, count), job.out.From(begin)};
  const LogitMatrix logits = {at, DType::kFloat32, sizes.padded_vocab, sizes.vocab};
  if (rows.in.rows > 0) {
    LOSSD_RETURN_IF_ERROR(device.gemms().Run(
        shapes_.Logits(count, sizes.padded_vocab),
        {.a = context_.weight(), .b = hidden + begin * sizes.padded_hidden * sizes.element, .c = logits.data},
        device.gemm_workspace(), device.compute()));
  }
  return step(rows, logits);
}

GemmShape StagedLogits::LargestGemm() const {
  const StagedBlock block = Blocks(context_.sizes.chunk_rows, Kept::kGradient).front();
  return shapes_.Logits(block.rows, context_.sizes.padded_vocab);
}

void* StagedLogits::LargestBlock() const {
  return At(Blocks(context_.sizes.chunk_rows, Kept::kGradient).front());
}

namespace {

// Rows of a block that are computed together.
struct RowSpan {
  int64_t begin = 0;
  int64_t rows = 0;
};

std::vector<RowSpan> PartsOf(int64_t rows, int64_t most) {
  std::vector<RowSpan> parts;
  for (int64_t begin = 0; begin < rows; begin += most) {
    parts.push_back({begin, std::min(most, rows - begin)});
  }
  return parts;
}

// The rows of a matrix from row `begin` on.
LogitMatrix From(const LogitMatrix& matrix, int64_t begin) {
  LogitMatrix rows = matrix;
  if (rows.data == nullptr) return rows;
  rows.data = static_cast<uint8_t*>(rows.data) + begin * rows.ld * static_cast<int64_t>(SizeOf(rows.dtype));
  return rows;
}

Kept KeptOf(const ChunkJob& job) { return job.wants_gradient() ? Kept::kGradient : Kept::kNothing; }

hopper::LogitForm FormOf(const LossTerms& terms) {
  return {.general = true, .scale = terms.scale, .bias = terms.bias, .softcap = terms.softcap};
}

}  // namespace

StoredPath::StoredPath(const PathContext& context)
    : context_(context),
      shapes_{context.sizes.padded_hidden, context.config.compute_dtype},
      staged_(context),
      gradients_(context),
      merger_(context),
      gradient_merger_(context),
      top_(context),
      soft_(context) {}

absl::Status StoredPath::Prepare(const ChunkJob& job) {
  Gemms& gemms = context_.device->gemms();
  const auto prepare_teacher = [&](int64_t rows) {
    return gemms.Prepare(job.teacher->shapes.Logits(rows, job.teacher->padded_vocab));
  };
  if (const TeacherRoom room = RoomOf(job); room.rows > 0) {
    if (room.known.parts > 0) return gradients_.GemmsOf(job.plan).Prepare(job);
    for (const RowSpan& part : PartsOf(job.padded_rows(), room.rows)) {
      LOSSD_RETURN_IF_ERROR(gemms.Prepare(shapes_.Logits(part.rows, context_.sizes.padded_vocab)));
      LOSSD_RETURN_IF_ERROR(prepare_teacher(part.rows));
    }
    return gradients_.GemmsOf(job.plan).Prepare(job);
  }
  LOSSD_RETURN_IF_ERROR(staged_.Prepare(job, KeptOf(job)));
  if (job.teacher != nullptr) {
    for (const int64_t rows : staged_.BlockRows(job, KeptOf(job))) {
      for (const RowSpan& part : PartsOf(rows, job.teacher->block_rows)) {
        LOSSD_RETURN_IF_ERROR(prepare_teacher(part.rows));
      }
    }
  }
  return gradients_.GemmsOf(job.plan).Prepare(job);
}

LogitMatrix StoredPath::elements() const {
  return {context_.memory[Region::kLogits], context_.config.compute_dtype, context_.sizes.padded_vocab,
          context_.sizes.vocab};
}

absl::Status StoredPath::RowLoss(const ChunkJob& job, bool selects) const {
  const LogitMatrix all = elements();
  const TeacherRoom room = RoomOf(job);
  const SoftmaxParts* const known = room.known.parts > 0 ? &room.known : nullptr;
  const auto step = [&](const RowBlock& rows, const LogitMatrix& logits) -> absl::Status {
    if (selects) LOSSD_RETURN_IF_ERROR(top_.Select(job, rows, logits));
    LogitMatrix gradient = all;
    gradient.data = static_cast<uint8_t*>(all.data) + rows.begin * all.ld * context_.sizes.element;
    if (!job.wants_gradient()) gradient.data = nullptr;
    if (job.teacher != nullptr) return DistilledRowLoss(job, rows, logits, gradient, known);
    return TargetRowLoss(job, rows, logits, gradient);
  };
  if (room.rows > 0) return ForEachBlockBesideTeacher(job, room, step);
  return staged_.ForEachBlock(job, KeptOf(job), step);
}

// Returns no rows without a teacher, or if the head computes in fp32. Otherwise it returns the rows that half
// of the teacher's memory holds, so that the student's logits fit behind the teacher's. If the products also
// compute the softmaxes, the parts of both softmaxes need room as well. They lie at the beginning of
// Region::kHiddenGradient, where FusedStoredPath has its partial sums, and this room also limits the rows.
StoredPath::TeacherRoom StoredPath::RoomOf(const ChunkJob& job) const {
  const HeadSizes& sizes = context_.sizes;
  if (job.teacher == nullptr || context_.config.compute_dtype == DType::kFloat32) return {};
  const TeacherRows& teacher = *job.teacher;
  const int64_t half = teacher.block_rows / 2 / 8 * 8;
  TeacherRoom room = {.rows = half, .student = teacher.logits + half * teacher.padded_vocab};
  const bool known =
      job.plan.why_logits_twice.empty() && sizes.fused && teacher.shapes.compute != DType::kFloat32;
  if (!known) return room;
  Carver partials(nullptr), fused(context_.memory[Region::kFusedRows]);
  hopper::TilePartials::Carve(partials, sizes.chunk_rows, sizes.most_classes);
  const int64_t parts = hopper::VocabTiles(sizes.vocab);
  int64_t rows = std::min(half, partials.used() / (2 * parts * int64_t{sizeof(SoftmaxPart)}) / 8 * 8);
  // The logit pass takes as long for fewer rows than a panel as for a whole panel, so smaller blocks do not
  // use it.
  if (rows < std::min<int64_t>(job.padded_rows(), hopper::kPanelRows)) return room;
  if (rows > hopper::kPanelRows) rows = rows / hopper::kPanelRows * hopper::kPanelRows;
  auto* const student = context_.memory.At<SoftmaxPart>(Region::kHiddenGradient);
  return {.rows = rows,
          .student = teacher.logits + rows * teacher.padded_vocab,
          .known = {student, student + rows * parts, parts,
                    hopper::FusedRows::Carve(fused, sizes.chunk_rows).claimed_positions}};
}

absl::Status StoredPath::LogitsAndSoftmaxes(const hopper::LogitOperands& operands, float temperature,
                                            float* logits, SoftmaxPart* parts,
                                            uint32_t* claimed_positions) const {
  const DeviceLimits& limits = context_.device->limits();
  const cudaStream_t stream = context_.device->compute();
  LOSSD_RETURN_IF_CUDA_ERROR(
      cudaMemsetAsync(claimed_positions, 0, hopper::kMostClusters * sizeof(*claimed_positions), stream),
      "memset of positions");
  return ToStatus(
      hopper::LaunchLogitPass(
          operands,
          hopper::SoftmaxPass{temperature, logits, parts, {&limits.cluster_order, claimed_positions}},
          limits.fused_clusters, stream),
      "logits kernel");
}

absl::Status StoredPath::ForEachBlockBesideTeacher(const ChunkJob& job, const TeacherRoom& room,
                                                   StagedLogits::BlockStep step) const {
  const HeadSizes& sizes = context_.sizes;
  const auto* const hidden = static_cast<const uint8_t*>(job.hidden);
  if (room.known.parts > 0) {  // the softmaxes lie where dx will be
    LOSSD_RETURN_IF_ERROR(Await(*context_.download_idle, context_.device->compute()));
  }
  for (const RowSpan& part : PartsOf(job.padded_rows(), room.rows)) {
    if (room.known.parts == 0) {
      LOSSD_RETURN_IF_ERROR(staged_.ComputeBlock(job, part.begin, part.rows, room.student, step));
      continue;
    }
    const RowBlock rows = {part.begin, job.in.Block(part.begin, part.rows), job.out.From(part.begin)};
    if (rows.in.rows > 0) {
      const hopper::LogitOperands operands = {
          .hidden = hidden + part.begin * sizes.padded_hidden * sizes.element,
          .weight = context_.weight(),
          .dtype = context_.config.compute_dtype,
          .inner = sizes.padded_hidden,
          .rows = part.rows,
          .classes = sizes.vocab,
          .padded_classes = sizes.padded_vocab,
          .form = FormOf(job.terms)};
      LOSSD_RETURN_IF_ERROR(LogitsAndSoftmaxes(operands, job.options().distillation.temperature, room.student,
                                               room.known.student, room.known.claimed_positions));
    }
    LOSSD_RETURN_IF_ERROR(step(rows, {room.student, DType::kFloat32, sizes.padded_vocab, sizes.vocab}));
  }
  return absl::OkStatus();
}

absl::Status StoredPath::TargetRowLoss(const ChunkJob& job, const RowBlock& rows, const LogitMatrix& logits,
                                       const LogitMatrix& gradient) const {
  if (context_.sizes.is_split() || job.terms.soft) return SplitRowLoss(job, rows, logits, gradient);
  const RowLossParams p = {logits, gradient, job.terms, rows.in, rows.out, !job.plan.uniform_apart};
  return ToStatus(LaunchRowLoss(p, context_.device->limits(), context_.device->compute()), "row loss kernel");
}

absl::Status StoredPath::DistilledRowLoss(const ChunkJob& job, const RowBlock& rows,
                                          const LogitMatrix& logits, const LogitMatrix& gradient,
                                          const SoftmaxParts* known) const {
  for (const RowSpan& span : PartsOf(rows.in.padded_rows, job.teacher->block_rows)) {
    const RowBlock part = {rows.begin + span.begin, rows.in.Block(span.begin, span.rows),
                           rows.out.From(span.begin)};
    LOSSD_RETURN_IF_ERROR(Distil(job, part, From(logits, span.begin), From(gradient, span.begin),
                                 job.divergence + part.begin, known));
  }
  return absl::OkStatus();
}

// There are three ways to the loss, in this order in the function:
// - `known`: the products have computed the softmaxes, and one kernel computes loss and gradient.
// - `whole`: one kernel computes everything from the logits.
// - Otherwise: the sums over all classes, the loss with targets, and then both together (distill_rows.h).
absl::Status StoredPath::Distil(const ChunkJob& job, const RowBlock& rows, const LogitMatrix& logits,
                                const LogitMatrix& gradient, float* divergence,
                                const SoftmaxParts* known) const {
  Device& device = *context_.device;
  const cudaStream_t stream = device.compute();
  const TeacherRows& teacher = *job.teacher;
  const bool mixes = MixesTargets(job.options().distillation);
  // Whether one kernel computes everything: all classes are here, and the loss with targets does not count.
  const bool whole = !mixes && !context_.sizes.is_split();
  DivergenceParams p = {
      .student = logits,
      .teacher = {teacher.logits, DType::kFloat32, teacher.padded_vocab, teacher.terms.vocab},
      .student_terms = job.terms,
      .teacher_terms = teacher.terms,
      .distillation = job.options().distillation,
      .in = rows.in,
      .out = rows.out,
      .rows = teacher.rows.From(rows.begin),
      .divergence = divergence,
      .gradient = gradient,
      .wants_logprob = teacher.wants_logprob};
  const void* const hidden = static_cast<const uint8_t*>(teacher.hidden) +
                             rows.begin * teacher.shapes.padded_hidden * teacher.element;
  if (known != nullptr) {
    p.student_parts = known->student;
    p.teacher_parts = known->teacher;
    p.parts = static_cast<int>(known->parts);
    if (rows.in.rows > 0) {
      const hopper::LogitOperands operands = {.hidden = hidden,
                                              .weight = teacher.weight,
                                              .dtype = teacher.shapes.compute,
                                              .inner = teacher.shapes.padded_hidden,
                                              .rows = rows.in.padded_rows,
                                              .classes = teacher.terms.vocab,
                                              .padded_classes = teacher.padded_vocab,
                                              .form = FormOf(teacher.terms)};
      LOSSD_RETURN_IF_ERROR(LogitsAndSoftmaxes(operands, p.distillation.temperature, teacher.logits,
                                               known->teacher, known->claimed_positions));
    }
    return ToStatus(LaunchKnownDivergence(p, stream), "divergence kernel");
  }
  if (rows.in.rows > 0) {
    LOSSD_RETURN_IF_ERROR(device.gemms().Run(teacher.shapes.Logits(rows.in.padded_rows, teacher.padded_vocab),
                                             {.a = teacher.weight, .b = hidden, .c = teacher.logits},
                                             device.gemm_workspace(), stream));
    if (!whole) LOSSD_RETURN_IF_ERROR(SumDivergences(p));
    if (mixes && gradient.data != nullptr) {
      LOSSD_RETURN_IF_CUDA_ERROR(LaunchDivergenceGradient(p, stream), "divergence kernel");
    }
  }
  if (whole) {
    return ToStatus(LaunchWholeDivergence(p, stream), "divergence kernel");
  }
  RowBlock with_target = rows;
  with_target.in.weights = p.rows.target_weights;
  with_target.in.coef_loss = p.rows.target_coefs;
  // If the loss with targets has no gradient, its kernels must not change the logits, because
  // FinishDivergence still needs them.
  LogitMatrix of_targets = gradient;
  if (!mixes) of_targets.data = nullptr;
  LOSSD_RETURN_IF_ERROR(TargetRowLoss(job, with_target, logits, of_targets));
  return ToStatus(LaunchFinishDivergence(p, stream), "divergence kernel");
}

// If the head is split, the devices exchange their records between the kernels.
absl::Status StoredPath::SumDivergences(const DivergenceParams& p) const {
  const cudaStream_t stream = context_.device->compute();
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchSoften(p, stream), "softmax kernel");
  LOSSD_RETURN_IF_ERROR(merger_.Merge(p, LaunchMergeSoftened));
  if (!NeedsSums(p.distillation)) return absl::OkStatus();
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchSumDivergence(p, stream), "divergence kernel");
  return merger_.Merge(p, LaunchAddDivergences);
}

// Computes statistics of the logits, merges them over all devices, and computes the gradient from the same
// logits. Also for rows with soft targets: soft_.ExtractNamed keeps the classes that they name out of the
// statistics, and soft_.SummariseNamed computes the statistics of these classes (SoftSteps in path_steps.h).
absl::Status StoredPath::SplitRowLoss(const ChunkJob& job, const RowBlock& rows, const LogitMatrix& logits,
                                      const LogitMatrix& gradient) const {
  const cudaStream_t stream = context_.device->compute();
  const auto [running, rules] = StoredRows::Of(context_.sizes, context_.memory);
  const ClassBlock block = {logits, gradient, 0};
  LOSSD_RETURN_IF_ERROR(soft_.ExtractNamed(job, rows, block));
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchFoldBlock(block, job.terms, rows.in, running, stream),
                             "statistics kernel");
  LOSSD_RETURN_IF_ERROR(merger_.Merge(job.terms, rows.in, running));
  LOSSD_RETURN_IF_ERROR(soft_.SummariseNamed(job, rows));
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchFinishRunning(job.terms, rows.in, context_.config.compute_dtype, rows.out,
                                                 running, rules, !job.plan.uniform_apart, stream),
                             "row results kernel");
  if (gradient.data == nullptr) return absl::OkStatus();
  float* const dropped =
      job.plan.filters_elements ? gradient_merger_.dropped_mass(job) + rows.begin : nullptr;
  return WriteBlockGradient(context_, soft_, job, rows, block, rules, dropped);
}

// Only the spare memory needs the wait. Beside a teacher, ForEachBlockBesideTeacher waits where it must.
absl::Status StoredPath::Loss(const ChunkJob& job) {
  const bool beside_teacher = RoomOf(job).rows > 0;
  if (!beside_teacher && staged_.UsesSpare(job, KeptOf(job))) {
    LOSSD_RETURN_IF_ERROR(Await(*context_.download_idle, context_.device->compute()));
  }
  return RowLoss(job, /*selects=*/true);
}

absl::Status StoredPath::HiddenGradient(const ChunkJob& job) {
  LOSSD_RETURN_IF_ERROR(Await(*context_.download_idle, context_.device->compute()));
  return HiddenGemm(job);
}

absl::Status StoredPath::WeightGradient(const ChunkJob& job) {
  LOSSD_RETURN_IF_ERROR(ZeroDroppedHidden(context_, job));
  LOSSD_RETURN_IF_ERROR(WeightGemm(job));
  context_.accumulators->weight_is_zero = false;
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Choice>> StoredPath::Describe(const ChunkPlan& plan) {
  std::vector<Choice> choices = cuda::Describe(plan);
  LOSSD_RETURN_IF_ERROR(
      DescribeGemm(context_.device->gemms(), "logits product", staged_.LargestGemm(), choices));
  choices.push_back({.what = "row loss",
                     .choice = DescribeRowLoss(context_.sizes.padded_vocab, context_.device->limits())});
  LOSSD_RETURN_IF_ERROR(gradients_.GemmsOf(plan).Describe(choices));
  return choices;
}

absl::Status StoredPath::Tune(const void* hidden) {
  Device& device = *context_.device;
  const HeadSizes& sizes = context_.sizes;
  const int64_t rows = sizes.chunk_rows, vocab = sizes.padded_vocab;
  void* const logits = context_.memory[Region::kLogits];
  const auto tune = [&](const GemmShape& shape, const GemmOperands& operands) {
    return device.gemms().Tune(shape, operands, device.gemm_workspace(), device.compute());
  };
  LOSSD_RETURN_IF_ERROR(
      tune(staged_.LargestGemm(), {.a = context_.weight(), .b = hidden, .c = staged_.LargestBlock()}));
  LOSSD_RETURN_IF_ERROR(
      tune(shapes_.HiddenGradient(rows, vocab, context_.config.compute_dtype),
           {.a = context_.weight(), .b = logits, .c = context_.memory[Region::kHiddenGradient]}));
  if (!context_.config.trainable) return absl::OkStatus();
  return tune(shapes_.WeightGradient(rows, vocab),
              {.a = hidden, .b = logits, .c = context_.accumulators->weight, .alpha = 1e-3f, .beta = 1.0f});
}

FusedStoredPath::FusedStoredPath(const PathContext& context)
    : context_(context), gradients_(context), merger_(context), top_(context) {
  const HeadSizes& sizes = context.sizes;
  Carver rows(context.memory[Region::kFusedRows]);
  rows_ = hopper::FusedRows::Carve(rows, sizes.chunk_rows);
  merger_.UseIn(rows_);
  Carver partials(context.memory[Region::kHiddenGradient]);
  rows_.partials = hopper::TilePartials::Carve(partials, sizes.chunk_rows, sizes.most_classes);
}

absl::Status FusedStoredPath::Prepare(const ChunkJob& job) {
  return gradients_.GemmsOf(job.plan).Prepare(job);
}

absl::Status FusedStoredPath::Loss(const ChunkJob& job) {
  const DeviceLimits& limits = context_.device->limits();
  const cudaStream_t stream = context_.device->compute();
  const HeadSizes& sizes = context_.sizes;
  const hopper::FusedLossParams p = {
      .operands = {job.hidden, context_.weight(), context_.config.compute_dtype, sizes.padded_hidden,
                   sizes.padded_vocab},
      .terms = job.terms,
      .in = job.in,
      .out = job.out,
      .rows = rows_,
      .order = &limits.cluster_order};
  LOSSD_RETURN_IF_ERROR(Await(*context_.download_idle, stream));  // the partial sums lie where dx will be
  const bool selects = job.layout.top_k > 0;
  void* exponentials = job.wants_gradient() || selects ? context_.memory[Region::kLogits] : nullptr;
  LOSSD_RETURN_IF_CUDA_ERROR(hopper::LaunchFusedSums(p, exponentials, limits.fused_clusters, stream),
                             "fused loss kernels");
  LOSSD_RETURN_IF_ERROR(merger_.Merge(job.terms, job.in, rows_));
  if (selects) LOSSD_RETURN_IF_ERROR(top_.SelectOfExponentials(job, exponentials));
  if (!job.wants_gradient()) exponentials = nullptr;  // only the selection has needed them
  return ToStatus(hopper::LaunchFusedFinish(p, exponentials, nullptr, stream), "fused loss kernels");
}

// Writes dx to Region::kHiddenGradient without another wait. Loss has waited until the dx of the chunk before
// had left the region, and then kept partial sums there. LaunchFusedFinish, at the end of Loss, was the last
// to read these sums.
absl::Status FusedStoredPath::HiddenGradient(const ChunkJob& job) { return HiddenGemm(job); }

absl::Status FusedStoredPath::WeightGradient(const ChunkJob& job) {
  LOSSD_RETURN_IF_ERROR(WeightGemm(job));
  context_.accumulators->weight_is_zero = false;
  return absl::OkStatus();
}

absl::Status FusedStoredPath::WeightGemm(const ChunkJob& job) const {
  const int64_t ld = context_.sizes.padded_hidden;
  const DeviceMatrix hidden = {job.hidden, context_.config.compute_dtype, ld, ld};
  // Also zeroes the rows that must not be accumulated (keep), as ZeroDroppedHidden does on other paths.
  LOSSD_RETURN_IF_CUDA_ERROR(
      LaunchScaleRows(hidden, rows_.factor, 1.0f, context_.keep, job.rows(), context_.device->compute()),
      "kernel over hidden states");
  return gradients_.WeightGradient(job, Gradient());
}

absl::StatusOr<std::vector<Choice>> FusedStoredPath::Describe(const ChunkPlan& plan) {
  std::vector<Choice> choices = cuda::Describe(plan);
  choices.push_back(FusedLogitsChoice(context_.device->limits()));
  LOSSD_RETURN_IF_ERROR(gradients_.GemmsOf(plan).Describe(choices));
  return choices;
}

}  // namespace lossd::kernels::cuda
