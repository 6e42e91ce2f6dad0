// SPDX-License-Identifier: Apache-2.0
// CpuHead::EmbeddingRows: the chunks of a CPU head whose weight serves as an embedding
// (LossOptions::embedding). Either rows of the weight are returned, or gradients of these rows come in and
// are added. There is no matrix product, no norm and no loss.
//
// The rows lie in the buffers of other chunks: rows that go out in grad_hidden, gradients that come in in
// hidden.
#include <algorithm>
#include <cmath>

#include "kernels/cpu/cpu_head.h"
#include "kernels/errors/status_macros.h"

namespace lossd::kernels {
namespace {

// The least number of rows of d elements for which a thread is worth waking.
int64_t GrainOfRows(int64_t d) { return std::max<int64_t>(1, (1 << 15) / d); }

}  // namespace

int64_t CpuHead::EmbeddingRows::OwnPlaceOf(int64_t gathered) const {
  const RowSource& source = head_.buffers_.sources[gathered];
  const int64_t place =
      chunk_.slices[static_cast<size_t>(source.slice)].targets[source.row] - head_.classes_.first;
  return place >= 0 && place < head_.classes_.rows ? place : -1;
}

absl::Status CpuHead::EmbeddingRows::Compute() {
  const bool rows_go_out = chunk_.options.embedding == Embedding::kRows;
  chunk_.choices = {{.what = rows_go_out ? "embedding rows" : "embedding gradients",
                     .choice = rows_go_out ? "from the fp32 weight" : "added in order of rows"}};
  for (Slice& slice : chunk_.slices) {
    slice.first_nonfinite_row = -1;
    slice.sums = LossSums();
    slice.sums.valid_rows =
        slice.rows - std::count(slice.targets, slice.targets + slice.rows, kIgnoredTarget);
  }
  if (rows_go_out) return LookUp();
  LOSSD_RETURN_IF_ERROR(GatherGradients());
  AddGradients();
  return absl::OkStatus();
}

// Looks up the rows of the gathered classes. Each part of a head fills in the rows of its own classes, and
// zeros for all others, so the sum over the parts is the row.
absl::Status CpuHead::EmbeddingRows::LookUp() {
  const int64_t d = head_.config_.hidden_size;
  const RowRange rows = {0, order_.rows};
  const float* const weight = head_.buffers_.value(Param::kWeight);
  head_.pool_->ParallelFor(order_.rows, GrainOfRows(d), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t place = OwnPlaceOf(i);
      float* const row = head_.buffers_.grad_hidden + i * d;
      if (place < 0) {
        std::fill_n(row, d, 0.0f);
      } else {
        std::copy_n(weight + place * d, d, row);
      }
    }
  });
  LOSSD_RETURN_IF_ERROR(head_.exchange_->SumRows(head_.part_, head_.buffers_.grad_hidden, rows, d).status());
  LOSSD_TRY(const RowRange here,
            head_.exchange_->CollectRows(head_.part_, head_.buffers_.grad_hidden, rows, rows, d));
  head_.ScatterGradHidden(chunk_, here);
  return absl::OkStatus();
}

// Gathers the gradients of the rows, scaled, and finds the slices with a gradient that is not finite.
absl::Status CpuHead::EmbeddingRows::GatherGradients() {
  const int64_t d = head_.config_.hidden_size;
  head_.pool_->ParallelFor(order_.rows, GrainOfRows(d), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const RowSource& source = head_.buffers_.sources[i];
      const Slice& slice = chunk_.slices[static_cast<size_t>(source.slice)];
      float* const row = head_.buffers_.hidden + i * d;
      ToFloat(chunk_.hidden_dtype, HiddenRow(chunk_, slice, source.row, d), d, row);
      std::for_each(row, row + d, [scale = slice.grad_scale](float& value) { value *= scale; });
      head_.buffers_.results[i].finite = SelectRowLoops().all_finite(row, d);
    }
  });
  if (head_.is_split_) LOSSD_RETURN_IF_ERROR(ShareVerdicts());
  head_.guard_.FindFailedSlices(chunk_, order_);
  return absl::OkStatus();
}

// Makes all parts of a head leave out the same slices. Each part has read the rows itself, from memory that a
// client may change meanwhile, so parts may disagree. A row that one part finds not finite counts as such for
// all parts.
absl::Status CpuHead::EmbeddingRows::ShareVerdicts() {
  float* const own = head_.buffers_.bad_rows;
  float* const all = own + head_.chunk_rows_;
  for (int64_t i = 0; i < order_.rows; ++i) own[i] = head_.buffers_.results[i].finite ? 0.0f : 1.0f;
  std::fill_n(all, order_.rows, 0.0f);
  LOSSD_RETURN_IF_ERROR(head_.exchange_->AddSums(head_.part_, own, all, order_.rows));
  for (int64_t i = 0; i < order_.rows; ++i) head_.buffers_.results[i].finite = all[i] == 0.0f;
  return absl::OkStatus();
}

// Each thread adds its columns of all rows, in the order of the rows. So the sums do not depend on the number
// of threads.
void CpuHead::EmbeddingRows::AddGradients() {
  const int64_t d = head_.config_.hidden_size;
  float* const gradient = head_.buffers_.gradient(Param::kWeight);
  const int64_t grain = std::max<int64_t>(16, (1 << 15) / std::max<int64_t>(order_.accumulated, 1));
  head_.pool_->ParallelFor(d, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = 0; i < order_.accumulated; ++i) {
      const int64_t place = OwnPlaceOf(i);
      if (place < 0 ||
          chunk_.slices[static_cast<size_t>(head_.buffers_.sources[i].slice)].first_nonfinite_row >= 0)
        continue;
      float* const to = gradient + place * d;
      const float* const from = head_.buffers_.hidden + i * d;
      for (int64_t j = begin; j < end; ++j) to[j] += from[j];
    }
  });
}

}  // namespace lossd::kernels
