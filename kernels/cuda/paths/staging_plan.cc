// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/paths/staging_plan.h"

#include <algorithm>

#include "kernels/cuda/device/device_memory.h"

namespace lossd::kernels::cuda {
namespace {

constexpr int64_t kAlignment = 256;
// A spare block has a row of so many of the chunk at least, which makes a dozen blocks of a full one.
constexpr int64_t kSpareShare = 96;

int64_t StagedBytes(const HeadSizes& sizes, int64_t rows) {
  return rows * sizes.planned_vocab() * static_cast<int64_t>(sizeof(float));
}

// Whole panels of the products, or what there is below one.
int64_t WholePanels(int64_t rows) { return rows >= 128 ? rows / 128 * 128 : rows / 8 * 8; }

// Where the logits of a block may lie in Region::kLogits behind what is kept of it and of the rows before.
int64_t OffsetBehind(const HeadSizes& sizes, Kept kept, int64_t end) {
  return kept == Kept::kNothing ? 0 : RoundUp(end * sizes.planned_vocab() * sizes.element, kAlignment);
}

bool StagedFits(const HeadSizes& sizes, Kept kept, int64_t begin, int64_t rows) {
  return OffsetBehind(sizes, kept, begin + rows) + StagedBytes(sizes, rows) <=
         sizes.chunk_rows * sizes.planned_vocab() * sizes.element;
}

// The most rows from `begin` on whose logits fit Region::kLogits.
int64_t RowsThatFit(const HeadSizes& sizes, Kept kept, int64_t begin, int64_t left) {
  if (StagedFits(sizes, kept, begin, left)) return left;
  int64_t fits = 0, fails = left / 8;  // in units of 8
  while (fails - fits > 1) {
    const int64_t middle = fits + (fails - fits) / 2;
    (StagedFits(sizes, kept, begin, 8 * middle) ? fits : fails) = middle;
  }
  return WholePanels(8 * fits);
}

}  // namespace

int64_t SpareBytes(const HeadConfig& config, const HeadSizes& sizes) {
  if (config.compute_dtype == DType::kFloat32) return 0;
  const int64_t gradient = sizes.chunk_rows * sizes.padded_hidden *
                           static_cast<int64_t>(SizeOf(HiddenGradientDType(sizes, config.compute_dtype)));
  const int64_t least = RoundUp(CeilDiv(sizes.chunk_rows, kSpareShare), 8);
  return std::max(gradient, StagedBytes(sizes, least));
}

std::vector<StagedBlock> PlanStaging(const HeadConfig& config, const HeadSizes& sizes, Kept kept,
                                     int64_t padded_rows) {
  if (config.compute_dtype == DType::kFloat32) return {{.begin = 0, .rows = padded_rows}};
  const int64_t spare = WholePanels(SpareBytes(config, sizes) / StagedBytes(sizes, 1));
  std::vector<StagedBlock> blocks;
  for (int64_t begin = 0; begin < padded_rows;) {
    const int64_t left = padded_rows - begin;
    const int64_t behind = RowsThatFit(sizes, kept, begin, left);
    StagedBlock block = {.begin = begin, .rows = behind};
    if (behind < std::min(spare, left)) {
      block.rows = std::min(spare, left);
      block.in_spare = true;
    } else {
      block.offset = OffsetBehind(sizes, kept, begin + behind);
    }
    blocks.push_back(block);
    begin += block.rows;
  }
  return blocks;
}

}  // namespace lossd::kernels::cuda
