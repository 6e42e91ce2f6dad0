// What a head says of its choices: those of a full chunk with gradients and default options, and the memory
// that goes with them.
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/chunk_plan.h"
#include "kernels/cuda/cuda_head.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/filter_plan.h"

namespace lossd::kernels::cuda {
namespace {

Choice ChunkChoice(const HeadSizes& sizes, int64_t most_rows, int64_t workspace_bytes) {
  return {.what = "chunk",
          .choice = absl::StrCat("up to ", sizes.chunk_rows, " rows"),
          .reason = sizes.chunk_rows >= most_rows ? "more are not allowed" : "the workspace holds no more",
          .workspace_bytes = workspace_bytes};
}

Choice FilterChoice(const FilterShape& shape, const DeviceLimits& limits) {
  Carver own(nullptr), logits(nullptr);
  FilterBuffers::Carve(shape, own, logits);
  const absl::string_view reason = WhyNotFilteredOnDevice(shape, limits);
  return {.what = "filtered gradients",
          .choice = reason.empty() ? "where asked for" : "never",
          .reason = std::string(reason),
          .workspace_bytes = own.used()};
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
  const ChunkPlan plan = PlanChunk({}, loss, filter, limits, device_->options().fused_loss, false);
  choices_ = {ChunkChoice(sizes_, device_->options().max_chunk_rows, plan_[MemoryKind::kWorkspace])};
  for (Choice& choice : cuda::Describe(plan)) choices_.push_back(std::move(choice));
  if (plan.fused()) {
    choices_.push_back({.what = "logits product",
                        .choice = absl::StrCat("with the loss, ", limits.fused_clusters, " clusters")});
  } else {
    LOSSD_RETURN_IF_ERROR(AddProduct("logits product", LogitsShape(sizes_.chunk_rows)));
    choices_.push_back({.what = "row loss", .choice = DescribeRowLoss(loss, limits)});
  }
  if (!plan.own_hidden_product()) {
    LOSSD_RETURN_IF_ERROR(
        AddProduct("hidden gradient product", HiddenGradientShape(sizes_.chunk_rows, config_.compute_dtype)));
  }
  if (config_.trainable && !plan.own_weight_product()) {
    LOSSD_RETURN_IF_ERROR(AddProduct("weight gradient product", WeightGradientShape(sizes_.chunk_rows)));
  }
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
