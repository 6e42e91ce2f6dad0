// A chunk of a head for Algorithm::kCut, block by block, so that the logits of no more than a block are in
// memory: first the statistics of all rows, then, with lse known and the guard passed, each block's gradient.
// Where small probabilities are left out, the filtered kernels do the rest: what they start from is listed by
// the logit pass, or else selected from all logits of few rows at a time. docs/kernels/cut.md has the whole
// picture.
#include <algorithm>
#include <cmath>

#include "absl/functional/function_ref.h"
#include "kernels/cuda/cuda_head.h"
#include "kernels/cuda/cuda_head_job.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/cut/cut_plan.h"
#include "kernels/cuda/cut/cut_rows.h"
#include "kernels/cuda/hopper/fused_lists.h"
#include "kernels/cuda/hopper/fused_loss.h"
#include "kernels/cuda/rows.h"
#include "kernels/cuda/tensor_ops.h"

namespace lossd::kernels::cuda {
namespace {

// Calls step(begin, size) for the blocks of [0, end); the last one ends at `limit`.
absl::Status ForEachBlock(int64_t end, int64_t block, int64_t limit,
                          absl::FunctionRef<absl::Status(int64_t, int64_t)> step) {
  for (int64_t begin = 0; begin < end; begin += block) {
    LOSSD_RETURN_IF_ERROR(step(begin, std::min(block, limit - begin)));
  }
  return absl::OkStatus();
}

// The rows [begin, begin + padded_rows) of a chunk; without logits.
RowLossParams RowsOf(const RowLossParams& chunk, int64_t begin, int64_t padded_rows) {
  RowLossParams p = chunk;
  p.logits = nullptr;
  p.rows = std::min(chunk.rows - begin, padded_rows);
  p.padded_rows = padded_rows;
  p.write_gradient = false;
  p.targets += begin;
  for (const float** values : {&p.target_dots, &p.weights, &p.coef_loss, &p.coef_lse, &p.coef_entropy}) {
    *values += begin;
  }
  for (float** values : {&p.loss, &p.z_loss_part, &p.lse, &p.entropy, &p.target_logprob}) *values += begin;
  p.argmax += begin;
  return p;
}

// Their block of classes from `first_class` on, with its logits at `logits`.
ClassBlock ClassesOf(const RowLossParams& rows, int64_t first_class, int64_t padded_classes, void* logits) {
  ClassBlock block = {rows, first_class, std::min(padded_classes, rows.vocab - first_class)};
  block.row.logits = logits;
  block.row.ld = padded_classes;
  return block;
}

Selection SelectionFor(const ChunkPlan& plan) {
  return plan.fused() ? Selection::kInPass : Selection::kFromLogits;
}

}  // namespace

CutArena CudaHead::Arena(const Job& job) const {
  return CutArena::Carve(CutShapeOf(config_, sizes_, device_->limits().multiprocessors), job.blocks,
                         workspace_.arena);
}

uint8_t* CudaHead::HiddenRows(const Job& job, int64_t begin) const {
  return static_cast<uint8_t*>(job.memory.hidden) + begin * sizes_.padded_hidden * sizes_.element;
}

uint8_t* CudaHead::WeightRows(int64_t first_class) const {
  return static_cast<uint8_t*>(values_.compute_weight) + first_class * sizes_.padded_hidden * sizes_.element;
}

FilterBlock CudaHead::PlanFilterBlock(const ChunkPlan& plan, int64_t rows) const {
  return ChooseFilterBlock(FilterShapeOf(config_, sizes_), SelectionFor(plan), rows, sizes_.arena_bytes);
}

void CudaHead::ChooseBlocks(Job& job) const {
  const CutShape shape = CutShapeOf(config_, sizes_, device_->limits().multiprocessors);
  job.blocks = ChooseCutBlocks(shape, job.layout.padded_rows, sizes_.arena_bytes);
  job.filter_block = PlanFilterBlock(job.plan, job.layout.padded_rows);
  if (!device_->options().smallest_blocks) return;
  job.blocks = SmallestCutBlocks(shape);
  job.filter_block = {job.blocks.rows};
}

absl::Status CudaHead::PrepareCutGemms(const Job& job) {
  Gemms& gemms = device_->gemms();
  const int64_t rows = job.layout.padded_rows;
  const auto prepare_rows = [&](int64_t, int64_t count) { return gemms.Prepare(LogitsShape(count)); };
  if (job.plan.filtered() && !job.plan.fused()) {
    LOSSD_RETURN_IF_ERROR(ForEachBlock(rows, job.filter_block.rows, rows, prepare_rows));
  }
  const auto prepare = [&](int64_t count, int64_t classes) -> absl::Status {
    if (!job.plan.fused()) LOSSD_RETURN_IF_ERROR(gemms.Prepare(LogitsShape(count, classes)));
    LOSSD_RETURN_IF_ERROR(gemms.Prepare(HiddenGradientShape(count, classes, DType::kFloat32)));
    return gemms.Prepare(WeightGradientShape(count, classes));
  };
  const int64_t vocab = sizes_.padded_vocab;
  return ForEachBlock(rows, job.blocks.rows, rows, [&](int64_t, int64_t count) {
    return ForEachBlock(vocab, job.blocks.classes, vocab,
                        [&](int64_t, int64_t classes) { return prepare(count, classes); });
  });
}

absl::Status CudaHead::CutForward(const Job& job, const RowLossParams& row) {
  if (!job.plan.filtered()) return CutStatistics(job, row);
  LOSSD_RETURN_IF_ERROR(CutFilter(job, row));
  const int64_t bytes = row.rows * static_cast<int64_t>(sizeof(float));
  return Branch(
      job, job.slot->rows_branch,
      [&]() -> absl::Status {
        LOSSD_RETURN_IF_ERROR(Zero(job.slot->device_out.dropped_mass, bytes, device_->compute()));
        return CutStatistics(job, row);
      },
      [] { return absl::OkStatus(); });
}

// Row results and rules.
absl::Status CudaHead::CutStatistics(const Job& job, const RowLossParams& row) {
  const cudaStream_t stream = device_->compute();
  const CutArena arena = Arena(job);
  return ForEachBlock(
      row.rows, job.blocks.rows, row.padded_rows, [&](int64_t begin, int64_t count) -> absl::Status {
        const RowLossParams rows = RowsOf(row, begin, count);
        if (job.plan.fused()) {
          hopper::FusedRows memory = workspace_.fused;
          memory.partials = arena.tiles;
          return FusedStatistics(job, rows, begin, memory);
        }
        const auto fold = [&](int64_t first, int64_t classes) -> absl::Status {
          const ClassBlock block = ClassesOf(rows, first, classes, arena.logits);
          LOSSD_RETURN_IF_ERROR(BlockLogits(job, block, begin));
          return ToStatus(LaunchFoldBlock(block, workspace_.running, stream), "statistics kernel");
        };
        LOSSD_RETURN_IF_ERROR(ForEachBlock(row.vocab, job.blocks.classes, sizes_.padded_vocab, fold));
        return ToStatus(LaunchFinishRunning(rows, workspace_.running, workspace_.rules + begin, stream),
                        "row results kernel");
      });
}

absl::Status CudaHead::FusedStatistics(const Job& job, const RowLossParams& rows, int64_t begin,
                                       const hopper::FusedRows& memory) {
  return ToStatus(hopper::LaunchFusedLoss({.loss = rows,
                                           .hidden = HiddenRows(job, begin),
                                           .weight = values_.compute_weight,
                                           .inner = sizes_.padded_hidden,
                                           .rows = memory,
                                           .rules = workspace_.rules + begin,
                                           .order = &device_->limits().cluster_order},
                                          device_->limits().fused_clusters, device_->compute()),
                  "fused loss kernels");
}

absl::Status CudaHead::BlockLogits(const Job& job, const ClassBlock& block, int64_t begin) {
  const RowLossParams& row = block.row;
  return device_->gemms().Run(
      LogitsShape(row.padded_rows, row.ld),
      {.a = WeightRows(block.first_class), .b = HiddenRows(job, begin), .c = row.logits}, nullptr,
      device_->compute());
}

// Row results, dx and the list of what is kept; all for nothing if the candidates overflow their pool, which
// the decision then says.
absl::Status CudaHead::CutFilter(const Job& job, const RowLossParams& row) {
  const cudaStream_t stream = device_->compute();
  const FilterBuffers& filter = workspace_.filter;
  const CutFilterArena arena = CutFilterArena::Carve(FilterShapeOf(config_, sizes_), SelectionFor(job.plan),
                                                     job.filter_block, workspace_.arena);
  LOSSD_RETURN_IF_ERROR(Zero(filter.counters, sizeof(FilterCounters), stream));
  LOSSD_RETURN_IF_ERROR(PrepareFilter(job, row));
  if (job.hidden_gemm) LOSSD_RETURN_IF_ERROR(Await(download_idle_, stream));
  const auto select_in_pass = [&](const RowLossParams& rows, int64_t begin) -> absl::Status {
    hopper::FusedRows memory = workspace_.fused;
    memory.partials = arena.tiles;
    memory.lists = arena.lists;
    memory.lists.log2_epsilon = std::log2(job.chunk->options.filter_epsilon);
    LOSSD_RETURN_IF_ERROR(FusedStatistics(job, rows, begin, memory));
    return ToStatus(hopper::LaunchSelectListed(rows, memory, SelectionOf(job, begin), stream),
                    "selection kernel");
  };
  const auto select_from_logits = [&](const RowLossParams& rows, int64_t begin) -> absl::Status {
    const ClassBlock all = ClassesOf(rows, 0, sizes_.padded_vocab, arena.logits);
    LOSSD_RETURN_IF_ERROR(BlockLogits(job, all, begin));
    return ToStatus(LaunchSelectRows(all.row, SelectionOf(job, begin), stream), "selection kernel");
  };
  const auto filter_block = [&](int64_t begin, int64_t count) -> absl::Status {
    const RowLossParams rows = RowsOf(row, begin, count);
    LOSSD_RETURN_IF_ERROR(job.plan.fused() ? select_in_pass(rows, begin) : select_from_logits(rows, begin));
    return FilterRows(job, rows, begin);
  };
  LOSSD_RETURN_IF_ERROR(ForEachBlock(row.rows, job.filter_block.rows, row.padded_rows, filter_block));
  return ToStatus(LaunchDecide({.selection = SelectionOf(job, 0),
                                .rows = row.rows,
                                .with_gradient = job.slot->device_in.with_gradient,
                                .decision = job.slot->device_out.decision},
                               stream),
                  "decision kernel");
}

// dx into its buffer, as the GEMM of another head would leave it, and the weight gradients.
absl::Status CudaHead::CutBackward(const Job& job) {
  if (!job.hidden_gemm && !job.layout.accumulate) return absl::OkStatus();
  const auto add_kept = [&]() -> absl::Status {
    if (!job.layout.accumulate) return absl::OkStatus();
    const DeviceMatrix hidden = {job.memory.hidden, config_.compute_dtype, sizes_.padded_hidden,
                                 sizes_.padded_hidden};
    LOSSD_RETURN_IF_CUDA_ERROR(
        LaunchZeroDroppedRows(hidden, workspace_.keep, job.layout.compact_rows, device_->compute()),
        "kernel over hidden states");
    return AddKept(job);
  };
  if (job.plan.filtered()) {
    LOSSD_RETURN_IF_ERROR(Branch(
        job, job.slot->weight_branch, [&] { return CutGradients(job); }, add_kept));
  } else {
    if (job.hidden_gemm) LOSSD_RETURN_IF_ERROR(Await(download_idle_, device_->compute()));
    LOSSD_RETURN_IF_ERROR(CutGradients(job));
  }
  if (job.layout.accumulate) weight_gradient_is_zero_ = false;
  return absl::OkStatus();
}

absl::Status CudaHead::CutGradients(const Job& job) {
  const ChunkLayout& layout = job.layout;
  const DeviceMatrix hidden = {job.memory.hidden, config_.compute_dtype, sizes_.padded_hidden,
                               sizes_.padded_hidden};
  LOSSD_RETURN_IF_CUDA_ERROR(
      LaunchSettleRules({workspace_.rules, hidden, layout.compact_rows, layout.padded_rows,
                         job.slot->device_in.accumulate, workspace_.keep},
                        device_->compute()),
      "kernel over hidden states");
  const RowLossParams row = RowLoss(job);
  return ForEachBlock(row.rows, job.blocks.rows, row.padded_rows, [&](int64_t begin, int64_t count) {
    return CutRowBlock(job, RowsOf(row, begin, count), begin);
  });
}

absl::Status CudaHead::CutRowBlock(const Job& job, const RowLossParams& row, int64_t begin) {
  const CutArena arena = Arena(job);
  const int64_t ld = sizes_.padded_hidden;
  const DType dtype = HiddenGradientType(job);
  void* const slot =
      static_cast<uint8_t*>(workspace_.hidden_gradient) + begin * ld * static_cast<int64_t>(SizeOf(dtype));
  void* const sums = dtype == DType::kFloat32 ? slot : arena.hidden_gradient;
  const auto add_block = [&](int64_t first, int64_t classes) -> absl::Status {
    const ClassBlock block = ClassesOf(row, first, classes, arena.logits);
    LOSSD_RETURN_IF_ERROR(BlockGradient(job, block, begin));
    if (job.hidden_gemm) LOSSD_RETURN_IF_ERROR(BlockHiddenGradient(job, block, sums));
    return job.layout.accumulate ? BlockWeightGradient(job, block, begin) : absl::OkStatus();
  };
  LOSSD_RETURN_IF_ERROR(ForEachBlock(row.vocab, job.blocks.classes, sizes_.padded_vocab, add_block));
  if (!job.hidden_gemm || sums == slot) return absl::OkStatus();
  return ToStatus(
      LaunchConvert({sums, DType::kFloat32, ld, ld}, {slot, dtype, ld, ld}, row.rows, device_->compute()),
      "convert kernel");
}

// ds of the block, over the gradient unit and the logit scale.
absl::Status CudaHead::BlockGradient(const Job& job, const ClassBlock& block, int64_t begin) {
  const cudaStream_t stream = device_->compute();
  const GradientRule* const rules = workspace_.rules + begin;
  if (job.plan.fused()) {
    return ToStatus(
        hopper::LaunchFusedGradient({block.row, HiddenRows(job, begin), WeightRows(block.first_class),
                                     sizes_.padded_hidden, rules, block.first_class, block.classes},
                                    device_->limits().fused_clusters, stream),
        "logit pass");
  }
  LOSSD_RETURN_IF_ERROR(BlockLogits(job, block, begin));
  return ToStatus(LaunchGradientBlock(block, rules, stream), "gradient kernel");
}

absl::Status CudaHead::BlockHiddenGradient(const Job& job, const ClassBlock& block, void* gradient) {
  return device_->gemms().Run(HiddenGradientShape(block.row.padded_rows, block.row.ld, DType::kFloat32),
                              {.a = WeightRows(block.first_class),
                               .b = block.row.logits,
                               .c = gradient,
                               .alpha = HiddenGradientScale(job),
                               .beta = block.first_class == 0 ? 0.0f : 1.0f},
                              nullptr, device_->compute());
}

absl::Status CudaHead::BlockWeightGradient(const Job& job, const ClassBlock& block, int64_t begin) {
  const cudaStream_t stream = device_->compute();
  const float scale = job.layout.unit * job.chunk->options.logit_scale;
  const int32_t* const keep = workspace_.keep + begin;
  const RowLossParams& row = block.row;
  const DeviceMatrix gradient = {row.logits, config_.compute_dtype, block.classes, row.ld};
  if (!job.layout.accumulate_all) {
    LOSSD_RETURN_IF_CUDA_ERROR(LaunchZeroDroppedRows(gradient, keep, row.rows, stream),
                               "kernel over a gradient");
  }
  if (gradients_.bias != nullptr) {
    LOSSD_RETURN_IF_CUDA_ERROR(LaunchColumnSum(gradient, keep, nullptr, row.rows, scale, Arena(job).partials,
                                               gradients_.bias + block.first_class, stream),
                               "column sum kernel");
  }
  return device_->gemms().Run(WeightGradientShape(row.padded_rows, row.ld),
                              {.a = HiddenRows(job, begin),
                               .b = row.logits,
                               .c = gradients_.weight + block.first_class * sizes_.padded_hidden,
                               .alpha = scale,
                               .beta = weight_gradient_is_zero_ && begin == 0 ? 0.0f : 1.0f},
                              nullptr, stream);
}

}  // namespace lossd::kernels::cuda
