// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/kernels/hopper/fused_choice.h"

#include "kernels/cuda/kernels/hopper/logit_tiles.h"

namespace lossd::kernels::cuda::hopper {
namespace {

// Below these the tiles are too few to fill the device, and cuBLAS splits the inner dimension.
constexpr int64_t kFewestFusedRows = 512;
constexpr int64_t kFewestFusedTiles = 512;

}  // namespace

absl::string_view WhyNotFused(const LossTerms& terms, DType compute, bool exponentials, int clusters) {
  if (clusters == 0) return "not a Hopper GPU";
  if (compute == DType::kFloat32) return "fp32 compute";
  if (compute == DType::kFloat16 && exponentials) return "fp16 has no room for exponentials";
  if (terms.smoothing > 0.0f) return "label smoothing has a gradient everywhere";
  return "";
}

absl::string_view WhyNotFaster(int64_t padded_rows, int64_t vocab) {
  if (padded_rows < kFewestFusedRows) return "few rows";
  if (CeilDiv(padded_rows, kRowTile) * VocabTiles(vocab) < kFewestFusedTiles) return "few tiles";
  return "";
}

}  // namespace lossd::kernels::cuda::hopper
