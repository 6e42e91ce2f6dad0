// What a head says of its choices: those of a full chunk with gradients and the options it has by itself, and
// the memory that goes with them.
#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/chunk_plan.h"
#include "kernels/cuda/cuda_head.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/filtered/filter_plan.h"
#include "kernels/cuda/hopper/tiles.h"

namespace lossd::kernels::cuda {
namespace {

absl::string_view WhyNoMoreRows(const HeadSizes& sizes, int64_t most_rows) {
  if (sizes.chunk_rows >= most_rows) return "more are not allowed";
  const bool in_panels = sizes.fused && sizes.chunk_rows % hopper::kPanelRows == 0;
  return in_panels ? "the workspace holds no more whole panels" : "the workspace holds no more";
}

Choice ChunkChoice(const HeadSizes& sizes, int64_t most_rows, int64_t workspace_bytes) {
  return {.what = "chunk",
          .choice = absl::StrCat("up to ", sizes.chunk_rows, " rows"),
          .reason = std::string(WhyNoMoreRows(sizes, most_rows)),
          .workspace_bytes = workspace_bytes};
}

Choice FilterChoice(const FilterShape& shape, const DeviceLimits& limits) {
  Carver own(nullptr), logits(nullptr);
  FilterBuffers::Carve(shape, own, logits, logits);
  const absl::string_view reason = WhyNotFilteredOnDevice(shape, limits);
  return {.what = "filtered gradients",
          .choice = reason.empty() ? "where asked for" : "never",
          .reason = std::string(reason),
          .workspace_bytes = own.used()};
}

Choice BlockChoice(const CutBlocks& blocks, int64_t arena_bytes) {
  return {.what = "blocks",
          .choice = absl::StrCat(blocks.rows, " rows, ", blocks.classes, " classes"),
          .reason = "the fastest that fit, by calculation",
          .workspace_bytes = arena_bytes};
}

Choice CandidatesChoice(const ChunkPlan& plan, const FilterBlock& block) {
  const std::string listed =
      absl::StrCat("listed by the logits product, ", block.rows, " rows, up to ", block.listed, " of each");
  return {.what = "candidates with an epsilon",
          .choice = plan.fused() ? listed : absl::StrCat("selected from the logits of ", block.rows, " rows"),
          .reason = std::string(plan.why_not_fused)};
}

}  // namespace

// What the choice depends on.
RowLossParams CudaHead::FullChunk() const {
  RowLossParams p;
  p.dtype = config_.compute_dtype;
  p.ld = sizes_.padded_vocab;
  p.vocab = sizes_.vocab;
  p.rows = p.padded_rows = sizes_.chunk_rows;
  p.write_gradient = true;
  p.bias = values_.params.bias;
  return p;
}

absl::Status CudaHead::MakeChoices() {
  const DeviceLimits& limits = device_->limits();
  const RowLossParams loss = FullChunk();
  const FilterShape filter = FilterShapeOf(config_, sizes_);
  const Algorithm algorithm = config_.algorithm;
  const ChunkPlan plan = Plan({.algorithm = algorithm, .filter_epsilon = DefaultFilterEpsilon(algorithm)},
                              loss, config_.compute_dtype);
  const int64_t most_rows = device_->options().max_chunk_rows;
  choices_ = {ChunkChoice(sizes_, IsCut() ? std::min(most_rows, kCutChunkRows) : most_rows,
                          plan_[MemoryKind::kWorkspace])};
  CutBlocks blocks = {sizes_.chunk_rows, sizes_.padded_vocab};
  if (IsCut()) {
    const CutShape shape = CutShapeOf(config_, sizes_, limits.multiprocessors);
    blocks = ChooseCutBlocks(shape, sizes_.chunk_rows, sizes_.arena_bytes);
    choices_.push_back(BlockChoice(blocks, sizes_.arena_bytes));
  }
  for (Choice& choice : cuda::Describe(plan)) choices_.push_back(std::move(choice));
  if (plan.fused()) {
    choices_.push_back({.what = "logits product",
                        .choice = absl::StrCat("with the loss, ", limits.fused_clusters, " clusters")});
  } else {
    LOSSD_RETURN_IF_ERROR(AddProduct("logits product", LogitsShape(blocks.rows, blocks.classes)));
    if (!IsCut()) choices_.push_back({.what = "row loss", .choice = DescribeRowLoss(loss, limits)});
  }
  if (!plan.own_products()) {
    const DType dtype = IsCut() ? DType::kFloat32 : config_.compute_dtype;
    LOSSD_RETURN_IF_ERROR(
        AddProduct("hidden gradient product", HiddenGradientShape(blocks.rows, blocks.classes, dtype)));
  }
  if (config_.trainable && !plan.own_products()) {
    LOSSD_RETURN_IF_ERROR(
        AddProduct("weight gradient product", WeightGradientShape(blocks.rows, blocks.classes)));
  }
  if (IsCut()) choices_.push_back(CandidatesChoice(plan, PlanFilterBlock(plan, sizes_.chunk_rows)));
  choices_.push_back(FilterChoice(filter, limits));
  return absl::OkStatus();
}

absl::Status CudaHead::AddProduct(absl::string_view what, const GemmShape& shape) {
  LOSSD_RETURN_IF_ERROR(device_->gemms().Prepare(shape));
  choices_.push_back(device_->gemms().Describe(shape));
  choices_.back().what = std::string(what);
  return absl::OkStatus();
}

}  // namespace lossd::kernels::cuda
