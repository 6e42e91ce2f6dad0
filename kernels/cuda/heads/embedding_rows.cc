// SPDX-License-Identifier: Apache-2.0
// EmbeddingRows (embedding_rows.h): the places of rows in device memory, the reading of rows of the weight
// (LookUp), and the adding of gradients of rows (TakeGradients).
#include "kernels/cuda/heads/embedding_rows.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/paths/chunk_plan.h"
#include "kernels/validation.h"

namespace lossd::kernels::cuda {
namespace {

// Whether `data` is memory of this GPU, so that its kernels may write rows there. Rows for other memory are
// copied.
absl::StatusOr<bool> IsMemoryOf(int device, const void* data) {
  cudaPointerAttributes attributes = {};
  LOSSD_RETURN_IF_CUDA_ERROR(cudaPointerGetAttributes(&attributes, data), "cudaPointerGetAttributes");
  return attributes.type == cudaMemoryTypeDevice && attributes.device == device;
}

Choice EmbeddingChoice(const ChunkJob& job, DType source) {
  if (job.options().embedding == Embedding::kRows) {
    return {.what = "embedding rows", .choice = absl::StrCat("from the ", Name(source), " weight")};
  }
  const ClassRuns& runs = job.layout.runs;
  return {.what = "embedding gradients",
          .choice = absl::StrCat("added up by class, ", runs.rows, " rows of ", runs.runs, " classes"),
          .reason = runs.long_runs == 0
                        ? std::string()
                        : absl::StrCat(runs.long_runs, " classes have at least ", kLongClassRun, " rows")};
}

}  // namespace

void EmbeddingRows::Prepare(ChunkJob& job, ChunkSlot& slot) const {
  *slot.host_out.lost = 0;  // no kernel of these chunks writes it
  if (job.layout.accumulate) job.layout.runs = OrderByClass(job.layout, sizes_.vocab, slot.host_in);
  job.chunk->choices = {EmbeddingChoice(job, SourceFor(job.chunk->hidden_dtype).dtype)};
}

absl::Status EmbeddingRows::Enqueue(const ChunkJob& job, const ChunkSlot& slot) const {
  if (job.options().embedding == Embedding::kGradients) return TakeGradients(job, slot);
  const cudaStream_t upload = device_->upload();
  LOSSD_RETURN_IF_ERROR(Copy(slot.memory.inputs, slot.host_inputs.data(), slot.input_bytes, upload));
  LOSSD_RETURN_IF_ERROR(Record(slot.uploaded, upload));
  return sizes_.is_split() ? LookUpParts(job, slot) : LookUp(job, slot);
}

// ---- where the rows lie ----

// A slot has room for the rows of a full chunk in the compute dtype; in a head with a norm, in any dtype.
// Then all rows lie in the slot (RawRows::first). If the rows are wider, which means fp32 rows of a head that
// computes in 16 bits, the slot takes half of a full chunk, and Region::kHiddenGradient takes the other half.
RawRows EmbeddingRows::PlaceOf(const ChunkJob& job, const ChunkSlot& slot) const {
  RawRows place;
  place.dtype = job.chunk->hidden_dtype;
  place.cols = sizes_.hidden;
  place.first = place.second = config_.norm != Norm::kNone ? slot.memory.raw : slot.memory.hidden;
  if (!SharesRegion(job)) return place;
  place.first_rows = sizes_.chunk_rows / 2;
  place.second = workspace_.paths[Region::kHiddenGradient];
  return place;
}

bool EmbeddingRows::SharesRegion(const ChunkJob& job) const {
  const auto row_element = static_cast<int64_t>(SizeOf(job.chunk->hidden_dtype));
  return config_.norm == Norm::kNone && row_element > sizes_.element;
}

// The event of this slot marks the work that other chunks have enqueued on the compute stream so far. The
// downloads of their hidden gradients are on another stream.
absl::Status EmbeddingRows::AwaitRegion(const ChunkSlot& slot, cudaStream_t stream) const {
  LOSSD_RETURN_IF_ERROR(Record(slot.hidden_gradient, device_->compute()));
  LOSSD_RETURN_IF_ERROR(Await(slot.hidden_gradient, stream));
  return Await(transfers_->download_idle(), stream);
}

absl::Status EmbeddingRows::ForPieces(const RawRows& place, int64_t begin, int64_t rows, PieceFn fn) const {
  const int64_t row_bytes = place.cols * static_cast<int64_t>(SizeOf(place.dtype));
  const auto at = [row_bytes](const void* base, int64_t row) {
    return static_cast<uint8_t*>(const_cast<void*>(base)) + row * row_bytes;
  };
  const int64_t in_first = std::clamp<int64_t>(place.first_rows - begin, 0, rows);
  if (in_first > 0) LOSSD_RETURN_IF_ERROR(fn(at(place.first, begin), 0, in_first));
  if (in_first == rows) return absl::OkStatus();
  return fn(at(place.second, begin + in_first - place.first_rows), in_first, rows - in_first);
}

// ---- rows of the weight that are read ----

// If there are several replicas, each replica has fp32 values only of its own shard; it has the other classes
// in the compute dtype.
DeviceMatrix EmbeddingRows::SourceFor(DType dtype) const {
  const ValueBuffer& values = tensors_->values();
  const bool has_replicas = CopyOf(config_, device_->options().replica).count > 1;
  if (has_replicas || dtype == config_.compute_dtype) {
    return {values.compute_weight, config_.compute_dtype, sizes_.hidden, sizes_.padded_hidden};
  }
  return {values.params.weight, DType::kFloat32, sizes_.hidden, sizes_.padded_hidden};
}

absl::Status EmbeddingRows::Gather(const ChunkJob& job, const ChunkSlot& slot, int64_t begin, int64_t rows,
                                   void* to) const {
  const DType dtype = job.chunk->hidden_dtype;
  const GatherClassesParams p = {.weight = SourceFor(dtype),
                                 .classes = sizes_.vocab,
                                 .map = slot.device_in.compact_of_raw + begin,
                                 .targets = slot.device_in.target,
                                 .rows = rows,
                                 .out = {to, dtype, sizes_.hidden, sizes_.hidden}};
  return ToStatus(LaunchGatherClasses(p, device_->download()), "gather kernel");
}

// All work is on the download stream, so that the rows do not wait for the weight gradient of the previous
// chunk. Rows whose destination is this GPU's memory are written there. Other rows are written to the slot
// and then copied.
absl::Status EmbeddingRows::LookUp(const ChunkJob& job, const ChunkSlot& slot) const {
  const cudaStream_t stream = device_->download();
  const int64_t row_bytes = sizes_.hidden * static_cast<int64_t>(SizeOf(job.chunk->hidden_dtype));
  const RawRows place = PlaceOf(job, slot);
  LOSSD_RETURN_IF_ERROR(Await(slot.uploaded, stream));
  std::vector<const SliceLayout*> to_copy;
  for (const SliceLayout& slice : job.layout.slices) {
    if (slice.compact_rows == 0) continue;  // ZeroUntouchedGradients
    void* const to = slice.slice->grad_hidden;
    const absl::StatusOr<bool> is_here = IsMemoryOf(device_->options().device, to);
    if (!is_here.ok()) return is_here.status();
    if (*is_here) {
      LOSSD_RETURN_IF_ERROR(Gather(job, slot, slice.raw_begin, slice.slice->rows, to));
    } else {
      to_copy.push_back(&slice);
    }
  }
  if (!to_copy.empty()) {
    if (SharesRegion(job)) LOSSD_RETURN_IF_ERROR(AwaitRegion(slot, stream));
    LOSSD_RETURN_IF_ERROR(ForPieces(
        place, 0, job.layout.raw_rows,
        [&](uint8_t* at, int64_t first, int64_t count) { return Gather(job, slot, first, count, at); }));
  }
  // Later work on the compute stream waits for this work, because it may change the weight.
  LOSSD_RETURN_IF_ERROR(Record(slot.row_results, stream));
  LOSSD_RETURN_IF_ERROR(Await(slot.row_results, device_->compute()));
  for (const SliceLayout* const slice : to_copy) {
    auto* const to = static_cast<uint8_t*>(slice->slice->grad_hidden);
    LOSSD_RETURN_IF_ERROR(ForPieces(place, slice->raw_begin, slice->slice->rows,
                                    [&](uint8_t* at, int64_t first, int64_t count) {
                                      return Copy(to + first * row_bytes, at, count * row_bytes, stream);
                                    }));
  }
  if (SharesRegion(job)) LOSSD_RETURN_IF_ERROR(Record(transfers_->download_idle(), stream));
  LOSSD_RETURN_IF_ERROR(Record(slot.results, stream));
  return Record(slot.done, stream);
}

// Each part has the rows of its own classes, and zeros for the rows of other classes. So the sum over the
// parts is the row. The sums go to the region of hidden gradients, and each part delivers the rows whose sum
// it has.
absl::Status EmbeddingRows::LookUpParts(const ChunkJob& job, const ChunkSlot& slot) const {
  const cudaStream_t compute = device_->compute(), download = device_->download();
  const int64_t d = sizes_.padded_hidden;
  auto* const rows = workspace_.paths.At<float>(Region::kHiddenGradient);
  GatherClassesParams p = {.weight = SourceFor(job.chunk->hidden_dtype),
                           .classes = sizes_.vocab,
                           .targets = slot.device_in.target,
                           .rows = job.rows(),
                           .out = {rows, DType::kFloat32, d, d}};
  p.weight.cols = d;  // the padding is 0
  LOSSD_RETURN_IF_ERROR(Await(slot.uploaded, compute));
  LOSSD_RETURN_IF_ERROR(Await(transfers_->download_idle(), compute));
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchGatherClasses(p, compute), "gather kernel");
  LOSSD_RETURN_IF_ERROR(link_->exchange->SumRows(rows, job.rows(), d));
  LOSSD_RETURN_IF_ERROR(Record(slot.hidden_gradient, compute));
  LOSSD_RETURN_IF_ERROR(Await(slot.hidden_gradient, download));
  for (const SliceLayout& place : job.layout.slices) {
    if (place.compact_rows > 0) LOSSD_RETURN_IF_ERROR(DownloadPart(job, slot, place));
  }
  LOSSD_RETURN_IF_ERROR(Record(transfers_->download_idle(), download));
  LOSSD_RETURN_IF_ERROR(Record(slot.results, download));
  return Record(slot.done, download);
}

// Converts the part of the slice's rows whose sums are here, and copies it to the slice.
absl::Status EmbeddingRows::DownloadPart(const ChunkJob& job, const ChunkSlot& slot,
                                         const SliceLayout& place) const {
  const cudaStream_t stream = device_->download();
  const DType dtype = job.chunk->hidden_dtype;
  const int64_t row_bytes = sizes_.hidden * static_cast<int64_t>(SizeOf(dtype));
  const int64_t begin = std::max(job.raw_rows_here.begin, place.raw_begin);
  const int64_t end = std::min(job.raw_rows_here.end, place.raw_begin + place.slice->rows);
  const DeviceMatrix source = {workspace_.paths[Region::kHiddenGradient], DType::kFloat32, sizes_.hidden,
                               sizes_.padded_hidden};
  const DeviceMatrix buffer = {workspace_.download_buffer, dtype, sizes_.hidden, sizes_.hidden};
  auto* const to = static_cast<uint8_t*>(place.slice->grad_hidden);
  const int64_t block_rows = sizes_.transfer_bytes / row_bytes;
  for (int64_t r = begin; r < end; r += block_rows) {
    const int64_t count = std::min(block_rows, end - r);
    LOSSD_RETURN_IF_CUDA_ERROR(
        LaunchScatterRows(source, buffer, slot.device_in.gradient_of_raw + r, count, 1.0f, stream),
        "scatter kernel");
    LOSSD_RETURN_IF_ERROR(
        Copy(to + (r - place.raw_begin) * row_bytes, buffer.data, count * row_bytes, stream));
  }
  return absl::OkStatus();
}

// ---- gradients of rows that are added ----

// Uploads and checks the gradients, and reports the slices that have a bad row. Then adds the gradients of
// the rows that are kept. A slice with a bad row adds nothing.
absl::Status EmbeddingRows::TakeGradients(const ChunkJob& job, const ChunkSlot& slot) const {
  LOSSD_RETURN_IF_ERROR(UploadGradients(job, slot));
  LOSSD_RETURN_IF_ERROR(GuardGradients(job, slot));
  const cudaStream_t download = device_->download();
  LOSSD_RETURN_IF_ERROR(Await(slot.row_results, download));
  LOSSD_RETURN_IF_ERROR(Copy(slot.host_out.first_bad, slot.device_out.first_bad,
                             job.layout.device_slices * static_cast<int64_t>(sizeof(int32_t)), download));
  LOSSD_RETURN_IF_ERROR(Record(slot.results, download));
  if (!job.layout.accumulate) return Record(slot.done, device_->compute());
  return device_->InBackground(slot.done, [&] { return AddGradients(job, slot); });
}

absl::Status EmbeddingRows::UploadGradients(const ChunkJob& job, const ChunkSlot& slot) const {
  const cudaStream_t stream = device_->upload();
  const RawRows place = PlaceOf(job, slot);
  const int64_t row_bytes = place.cols * static_cast<int64_t>(SizeOf(place.dtype));
  if (SharesRegion(job)) LOSSD_RETURN_IF_ERROR(AwaitRegion(slot, stream));
  LOSSD_RETURN_IF_ERROR(Copy(slot.memory.inputs, slot.host_inputs.data(), slot.input_bytes, stream));
  for (const SliceLayout& slice : job.layout.slices) {
    if (slice.compact_rows == 0) continue;
    const auto* const from = static_cast<const uint8_t*>(slice.slice->hidden);
    LOSSD_RETURN_IF_ERROR(
        ForPieces(place, slice.raw_begin, slice.slice->rows, [&](uint8_t* at, int64_t first, int64_t count) {
          return Copy(at, from + first * row_bytes, count * row_bytes, stream);
        }));
  }
  return Record(slot.uploaded, stream);
}

// Each part of a split head reads the gradients from the host by itself. If the gradients change during that
// time, the parts may see different values. So `bad` is summed over the parts; then all parts leave out the
// same slices.
absl::Status EmbeddingRows::GuardGradients(const ChunkJob& job, const ChunkSlot& slot) const {
  const cudaStream_t stream = device_->compute();
  float* const bad = slot.device_out.loss;  // these chunks have no loss; its memory is free
  const CheckRowGradientsParams check = {.gradients = PlaceOf(job, slot),
                                         .raw_of_compact = slot.device_in.raw_of_compact,
                                         .factors = slot.device_in.coef_loss,
                                         .rows = job.rows(),
                                         .bad = bad};
  const GuardRowGradientsParams guard = {.slices = job.layout.device_slices,
                                         .slice_begin = slot.device_in.slice_begin,
                                         .bad = bad,
                                         .accumulate = slot.device_in.accumulate,
                                         .first_bad = slot.device_out.first_bad,
                                         .keep = workspace_.keep};
  LOSSD_RETURN_IF_ERROR(Await(slot.uploaded, stream));
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchCheckRowGradients(check, stream), "check kernel");
  LOSSD_RETURN_IF_ERROR(link_->exchange->Sum(ExchangeKind::kRowStatistics, bad, job.rows()));
  LOSSD_RETURN_IF_CUDA_ERROR(LaunchGuardRowGradients(guard, stream), "guard kernel");
  return Record(slot.row_results, stream);
}

absl::Status EmbeddingRows::AddGradients(const ChunkJob& job, const ChunkSlot& slot) const {
  const RowInputBlock& in = slot.device_in;
  WeightAccumulators& accumulators = tensors_->accumulators();
  const AddClassRunsParams p = {.gradients = PlaceOf(job, slot),
                                .raw_of_compact = in.raw_of_compact,
                                .factors = in.coef_loss,
                                .keep = workspace_.keep,
                                .targets = in.target,
                                .row_order = in.row_order(),
                                .run_begin = in.run_begin(),
                                .run_rows = in.run_rows(),
                                .runs = job.layout.runs.runs,
                                .long_runs = job.layout.runs.long_runs,
                                .weight_gradient = accumulators.weight,
                                .ld = sizes_.padded_hidden};
  accumulators.weight_is_zero = false;
  return ToStatus(LaunchAddClassRuns(p, device_->compute()), "scatter kernel");
}

}  // namespace lossd::kernels::cuda
