// SPDX-License-Identifier: Apache-2.0
// The chunks of a CPU head whose weight serves as an embedding (LossOptions::embedding): rows of the weight
// go out, or gradients of them come in. There is no product, no norm and no loss.
#include <algorithm>
#include <cmath>

#include "kernels/cpu/cpu_head.h"
#include "kernels/errors/status_macros.h"

namespace lossd::kernels {
namespace {

// So many rows of d elements are worth a thread.
int64_t GrainOfRows(int64_t d) { return std::max<int64_t>(1, (1 << 15) / d); }

}  // namespace

int64_t CpuHead::OwnPlaceOf(const Chunk& chunk, int64_t gathered) const {
  const RowSource& source = buffers_.sources[gathered];
  const int64_t place = chunk.slices[static_cast<size_t>(source.slice)].targets[source.row] - classes_.first;
  return place >= 0 && place < classes_.rows ? place : -1;
}

absl::Status CpuHead::ComputeEmbedding(Chunk& chunk, const RowOrder& order) {
  const bool rows_go_out = chunk.options.embedding == Embedding::kRows;
  chunk.choices = {{.what = rows_go_out ? "embedding rows" : "embedding gradients",
                    .choice = rows_go_out ? "from the fp32 weight" : "added in order of rows"}};
  for (Slice& slice : chunk.slices) {
    slice.first_nonfinite_row = -1;
    slice.sums = LossSums();
    slice.sums.valid_rows =
        slice.rows - std::count(slice.targets, slice.targets + slice.rows, kIgnoredTarget);
  }
  if (rows_go_out) return LookUpRows(chunk, order);
  GatherRowGradients(chunk, order);
  AddRowGradients(chunk, order);
  return absl::OkStatus();
}

// Each part of a head has the rows of its classes and zeros for the others, so the sum over the parts is the
// row.
absl::Status CpuHead::LookUpRows(const Chunk& chunk, const RowOrder& order) {
  const int64_t d = config_.hidden_size;
  const RowRange rows = {0, order.rows};
  const float* const weight = buffers_.value(Param::kWeight);
  pool_->ParallelFor(order.rows, GrainOfRows(d), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t place = OwnPlaceOf(chunk, i);
      float* const row = buffers_.grad_hidden + i * d;
      if (place < 0) {
        std::fill_n(row, d, 0.0f);
      } else {
        std::copy_n(weight + place * d, d, row);
      }
    }
  });
  LOSSD_RETURN_IF_ERROR(exchange_->SumRows(part_, buffers_.grad_hidden, rows, d).status());
  LOSSD_TRY(const RowRange here, exchange_->CollectRows(part_, buffers_.grad_hidden, rows, rows, d));
  ScatterGradHidden(chunk, here);
  return absl::OkStatus();
}

// The scaled gradients of the gathered rows. Every part of a head looks at all rows, so all of them leave out
// the same slices.
void CpuHead::GatherRowGradients(const Chunk& chunk, const RowOrder& order) {
  const int64_t d = config_.hidden_size;
  pool_->ParallelFor(order.rows, GrainOfRows(d), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const RowSource& source = buffers_.sources[i];
      const Slice& slice = chunk.slices[static_cast<size_t>(source.slice)];
      float* const row = buffers_.hidden + i * d;
      ToFloat(chunk.hidden_dtype, HiddenRow(chunk, slice, source.row, d), d, row);
      std::for_each(row, row + d, [scale = slice.grad_scale](float& value) { value *= scale; });
      buffers_.results[i].finite = SelectRowLoops().all_finite(row, d);
    }
  });
  for (int64_t i = 0; i < order.rows; ++i) {
    if (buffers_.results[i].finite) continue;
    const RowSource& source = buffers_.sources[i];
    int64_t& first = chunk.slices[static_cast<size_t>(source.slice)].first_nonfinite_row;
    first = first < 0 ? source.row : std::min(first, source.row);
  }
}

// Each thread adds its columns of all rows, in order of rows. So the sums do not depend on how many threads
// there are.
void CpuHead::AddRowGradients(const Chunk& chunk, const RowOrder& order) {
  const int64_t d = config_.hidden_size;
  float* const gradient = buffers_.gradient(Param::kWeight);
  const int64_t grain = std::max<int64_t>(16, (1 << 15) / std::max<int64_t>(order.accumulated, 1));
  pool_->ParallelFor(d, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = 0; i < order.accumulated; ++i) {
      const int64_t place = OwnPlaceOf(chunk, i);
      if (place < 0 || chunk.slices[static_cast<size_t>(buffers_.sources[i].slice)].first_nonfinite_row >= 0)
        continue;
      float* const to = gradient + place * d;
      const float* const from = buffers_.hidden + i * d;
      for (int64_t j = begin; j < end; ++j) to[j] += from[j];
    }
  });
}

}  // namespace lossd::kernels
