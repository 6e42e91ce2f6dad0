// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/paths/distilled_recomputed_path.h"

#include <algorithm>

#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/device/device_memory.h"
#include "kernels/cuda/kernels/rows.h"
#include "kernels/cuda/paths/recomputed_path.h"

namespace lossd::kernels::cuda {
namespace {

constexpr int64_t kResultBytes = 7 * sizeof(float);  // of a row: RowResults, and the divergence
constexpr int64_t kSlack = 4096;                     // what carving rounds up

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
  carver.Take<float>(elements);  // the teacher's
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
    // The first pass has said the results, which may be on their way to the host.
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

// The head's own memory has partial sums of a block of classes.
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
