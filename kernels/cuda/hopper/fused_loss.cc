#include "kernels/cuda/hopper/fused_loss.h"

#include "kernels/cuda/hopper/fused_lists.h"

namespace lossd::kernels::cuda::hopper {
namespace {

// Below these the tiles are too few to fill the device, and cuBLAS splits the inner dimension.
constexpr int64_t kFewestRows = 512;
constexpr int64_t kFewestTiles = 512;

LogitPassParams MakePassParams(const FusedLossParams& params) {
  const RowLossParams& loss = params.loss;
  LogitPassParams p;
  p.hidden = params.hidden;
  p.weight = params.weight;
  p.dtype = loss.dtype;
  p.inner = params.inner;
  p.rows = loss.padded_rows;
  p.vocab = loss.vocab;
  p.padded_vocab = loss.ld;
  p.general = loss.IsGeneral();
  p.scale = loss.scale;
  p.bias = loss.bias;
  p.softcap = loss.softcap;
  p.targets = loss.targets;
  p.reference = params.rows.reference;
  p.threshold = params.rows.threshold;
  p.partials = params.rows.partials;
  p.lists = params.rows.lists;
  if (!loss.want_entropy) p.partials.spread = nullptr;
  if (loss.write_gradient) p.exponentials = loss.logits;
  return p;
}

}  // namespace

absl::string_view WhyNotFused(const RowLossParams& loss, int clusters) {
  if (clusters == 0) return "not a Hopper GPU";
  if (loss.dtype == DType::kFloat32) return "fp32 compute";
  if (loss.dtype == DType::kFloat16 && loss.write_gradient) return "fp16 has no room for exponentials";
  if (loss.smoothing > 0.0f) return "label smoothing has a gradient everywhere";
  if (loss.any_coef_entropy) return "the gradient of the entropy is no multiple of p";
  return "";
}

absl::string_view WhyNotFaster(const RowLossParams& loss) {
  if (loss.padded_rows < kFewestRows) return "few rows";
  if (CeilDiv(loss.padded_rows, kRowTile) * VocabTiles(loss.vocab) < kFewestTiles) return "few tiles";
  return "";
}

cudaError_t LaunchFusedGradient(const FusedGradientParams& params, int clusters, cudaStream_t stream) {
  LogitPassParams pass = MakePassParams({params.loss, params.hidden, params.weight, params.inner});
  pass.vocab = params.classes;
  pass.first_class = params.first_class;
  if (pass.bias != nullptr) pass.bias += params.first_class;
  pass.exponentials = params.loss.logits;
  pass.rules = params.rules;
  return LaunchLogitPass(pass, clusters, stream);
}

cudaError_t LaunchFusedLoss(const FusedLossParams& params, int clusters, cudaStream_t stream) {
  LogitPassParams pass = MakePassParams(params);
  pass.order = params.order;
  pass.taken = params.rows.taken;
  cudaError_t error = LaunchPrepareRows(params.loss, params.rows, stream);
  if (error == cudaSuccess) error = LaunchLogitPass(pass, clusters, stream);
  if (error == cudaSuccess) error = LaunchMergeTiles(params.loss, params.rows, false, stream);
  LogitPassParams again = pass;
  again.redo = params.rows.redo;
  again.order = nullptr;
  again.lists = {};
  if (error == cudaSuccess) error = LaunchLogitPass(again, clusters, stream);
  if (error == cudaSuccess) error = LaunchMergeTiles(params.loss, params.rows, true, stream);
  if (error == cudaSuccess) error = LaunchFinishRows(params.loss, params.rows, params.rules, stream);
  if (error != cudaSuccess || pass.lists.entries == nullptr) return error;
  again.redo = nullptr;
  again.lists = pass.lists;
  again.relist = params.rows.redo;
  error = LaunchPrepareRelist(params.loss, params.rows, stream);
  if (error == cudaSuccess) error = LaunchLogitPass(again, clusters, stream);
  again.redo = params.rows.redo;
  if (error == cudaSuccess) error = LaunchPrepareLastRelist(params.loss, params.rows, stream);
  return error == cudaSuccess ? LaunchLogitPass(again, clusters, stream) : error;
}

}  // namespace lossd::kernels::cuda::hopper
