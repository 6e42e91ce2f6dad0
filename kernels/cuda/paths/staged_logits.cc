// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/paths/staged_logits.h"

#include <algorithm>

#include "kernels/cuda/device/cuda_status.h"

namespace lossd::kernels::cuda {

StagedLogits::StagedLogits(const PathContext& context)
    : context_(context), shapes_{context.sizes.padded_hidden, context.config.compute_dtype} {}

absl::Status StagedLogits::Prepare(const ChunkJob& job, Kept kept) const {
  for (const StagedBlock& block : Blocks(job.padded_rows(), kept)) {
    LOSSD_RETURN_IF_ERROR(
        context_.device->gemms().Prepare(shapes_.Logits(block.rows, context_.sizes.padded_vocab)));
  }
  return absl::OkStatus();
}

bool StagedLogits::UsesSpare(const ChunkJob& job, Kept kept) const {
  const std::vector<StagedBlock> blocks = Blocks(job.padded_rows(), kept);
  return std::any_of(blocks.begin(), blocks.end(), [](const StagedBlock& block) { return block.in_spare; });
}

absl::Status StagedLogits::ForEachBlock(
    const ChunkJob& job, Kept kept,
    absl::FunctionRef<absl::Status(const RowBlock&, const LogitMatrix&)> step) const {
  Device& device = *context_.device;
  const HeadSizes& sizes = context_.sizes;
  const auto* const hidden = static_cast<const uint8_t*>(job.hidden);
  for (const StagedBlock& block : Blocks(job.padded_rows(), kept)) {
    const RowBlock rows = {block.begin, job.in.Block(block.begin, block.rows), job.out.From(block.begin)};
    const LogitMatrix logits = {At(block), DType::kFloat32, sizes.padded_vocab, sizes.vocab};
    if (rows.in.rows > 0) {
      LOSSD_RETURN_IF_ERROR(
          device.gemms().Run(shapes_.Logits(block.rows, sizes.padded_vocab),
                             {.a = context_.weight,
                              .b = hidden + block.begin * sizes.padded_hidden * sizes.element,
                              .c = logits.data},
                             device.gemm_workspace(), device.compute()));
    }
    LOSSD_RETURN_IF_ERROR(step(rows, logits));
  }
  return absl::OkStatus();
}

GemmShape StagedLogits::LargestGemm() const {
  const StagedBlock block = Blocks(context_.sizes.chunk_rows, Kept::kGradient).front();
  return shapes_.Logits(block.rows, context_.sizes.padded_vocab);
}

void* StagedLogits::LargestBlock() const {
  return At(Blocks(context_.sizes.chunk_rows, Kept::kGradient).front());
}

}  // namespace lossd::kernels::cuda
