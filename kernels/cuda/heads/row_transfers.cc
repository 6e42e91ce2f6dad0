// SPDX-License-Identifier: Apache-2.0
// ChunkSlots and RowTransfers (row_transfers.h): the copies of rows to the device (Upload) and of results
// back to the host (Download).
#include "kernels/cuda/heads/row_transfers.h"

#include <algorithm>
#include <cstring>

#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/device/device_memory.h"
#include "kernels/cuda/kernels/rows.h"

namespace lossd::kernels::cuda {

void ChunkSlot::LayOut(const Chunk& chunk) {
  int64_t rows = 0;
  for (const Slice& slice : chunk.slices) rows += slice.rows;
  const int64_t capacity = PadRows(rows);
  Carver in(host_inputs.data()), in_device(memory.inputs), out(host_outputs.data()),
      out_device(memory.outputs);
  host_in = RowInputBlock::Carve(in, capacity);
  device_in = RowInputBlock::Carve(in_device, capacity);
  host_out = RowOutputBlock::Carve(out, capacity);
  device_out = RowOutputBlock::Carve(out_device, capacity);
  input_bytes = in.used();
  output_bytes = out.used();
}

absl::Status ChunkSlots::Allocate(MemoryLedger* ledger, const HeadSizes& sizes) {
  const int64_t rows = sizes.chunk_rows;
  for (ChunkSlot& slot : slots_) {
    LOSSD_RETURN_IF_ERROR(Take(PinnedBuffer::Allocate(ledger, InputBlockBytes(rows)), slot.host_inputs));
    LOSSD_RETURN_IF_ERROR(Take(PinnedBuffer::Allocate(ledger, OutputBlockBytes(rows)), slot.host_outputs));
    LOSSD_RETURN_IF_ERROR(Take(PinnedBuffer::Allocate(ledger, ClassBlockBytes(rows)), slot.host_classes));
    Carver classes(slot.host_classes.data());
    slot.classes = RowClassBlock::Carve(classes, rows);
    for (Event* event :
         {&slot.uploaded, &slot.row_results, &slot.hidden_gradient, &slot.results, &slot.done}) {
      LOSSD_RETURN_IF_ERROR(Take(Event::Create(), *event));
    }
  }
  return absl::OkStatus();
}

void ChunkSlots::Place(const Workspace& workspace) {
  for (size_t i = 0; i < slots_.size(); ++i) slots_[i].memory = workspace.slots[i];
}

ChunkSlot& ChunkSlots::Next() {
  ChunkSlot& slot = slots_[next_];
  next_ = (next_ + 1) % slots_.size();
  return slot;
}

absl::Status RowTransfers::Start() { return Take(Event::Create(), download_idle_); }

int64_t RowTransfers::RowBytes(const ChunkJob& job) const {
  return sizes_.hidden * static_cast<int64_t>(SizeOf(job.chunk->hidden_dtype));
}

bool RowTransfers::IsDirect(const ChunkJob& job, const SliceLayout& place, int64_t rows) const {
  return job.direct && rows == place.slice->rows && sizes_.hidden == sizes_.padded_hidden;
}

absl::Status RowTransfers::Upload(const ChunkJob& job, const ChunkSlot& slot) {
  const cudaStream_t stream = device_->upload();
  LOSSD_RETURN_IF_ERROR(Copy(slot.memory.inputs, slot.host_inputs.data(), slot.input_bytes, stream));
  for (const SliceLayout& place : job.layout.slices) {
    if (place.compact_rows > 0) LOSSD_RETURN_IF_ERROR(UploadSlice(job, slot, place));
  }
  const int64_t padding = job.padded_rows() - job.rows();
  if (padding > 0 && config_.norm == Norm::kNone) {
    const int64_t row_bytes = sizes_.padded_hidden * sizes_.element;
    uint8_t* tail = static_cast<uint8_t*>(slot.memory.hidden) + job.rows() * row_bytes;
    LOSSD_RETURN_IF_ERROR(Zero(tail, padding * row_bytes, stream));
  }
  return Record(slot.uploaded, stream);
}

absl::Status RowTransfers::UploadSlice(const ChunkJob& job, const ChunkSlot& slot, const SliceLayout& place) {
  const cudaStream_t stream = device_->upload();
  const int64_t row_bytes = RowBytes(job);
  const auto* from = static_cast<const uint8_t*>(place.slice->hidden);
  uint8_t* keep = nullptr;
  const int64_t rows = place.slice->rows;
  if (place.slice->retained_offset >= 0) {
    uint8_t* const retained =
        static_cast<CudaRetained*>(job.chunk->retained)->data() + place.slice->retained_offset;
    // The first part of a split head retains the rows.
    if (from != nullptr && sizes_.part == 0) keep = retained;
    if (from == nullptr) from = retained;
  }
  // Copies rows to this GPU, and from there to the retained rows. `from` may be memory of another GPU, so the
  // retained copy is made from this GPU's copy.
  const auto bring = [&](void* to, int64_t first, int64_t count) {
    LOSSD_RETURN_IF_ERROR(Copy(to, from + first * row_bytes, count * row_bytes, stream));
    if (keep == nullptr) return absl::OkStatus();
    return Copy(keep + first * row_bytes, to, count * row_bytes, stream);
  };
  if (config_.norm != Norm::kNone) {
    return bring(static_cast<uint8_t*>(slot.memory.raw) + place.raw_begin * row_bytes, 0, rows);
  }
  // Rows that need a conversion take the way over the upload buffer, as many at a time as it holds.
  auto* hidden = static_cast<uint8_t*>(slot.memory.hidden);
  if (IsDirect(job, place, place.compact_rows))
    return bring(hidden + place.compact_begin * row_bytes, 0, rows);
  const DeviceMatrix buffer = {workspace_.upload_buffer, job.chunk->hidden_dtype, sizes_.hidden,
                               sizes_.hidden};
  const DeviceMatrix target = {hidden, config_.compute_dtype, sizes_.hidden, sizes_.padded_hidden};
  const int64_t block_rows = sizes_.transfer_bytes / row_bytes;
  for (int64_t r = 0; r < rows; r += block_rows) {
    const int64_t count = std::min(block_rows, rows - r);
    LOSSD_RETURN_IF_ERROR(bring(buffer.data, r, count));
    LOSSD_RETURN_IF_CUDA_ERROR(
        LaunchGatherRows(buffer, target, slot.device_in.compact_of_raw + place.raw_begin + r, count, stream),
        "gather kernel");
  }
  return absl::OkStatus();
}

absl::Status RowTransfers::Download(const ChunkJob& job, const ChunkSlot& slot) {
  const cudaStream_t stream = device_->download();
  // If hidden gradients are wanted, wait for their guard, because it can still change the rows' results.
  LOSSD_RETURN_IF_ERROR(Await(job.wants_hidden_gradient ? slot.hidden_gradient : slot.row_results, stream));
  LOSSD_RETURN_IF_ERROR(Copy(slot.host_outputs.data(), slot.memory.outputs, slot.output_bytes, stream));
  if (job.layout.want_hidden_gradient) {
    for (const SliceLayout& place : job.layout.slices) {
      if (place.compact_rows == 0 || place.slice->grad_hidden == nullptr) continue;
      LOSSD_RETURN_IF_ERROR(DownloadSlice(job, slot, place));
    }
    LOSSD_RETURN_IF_ERROR(Record(download_idle_, stream));
  }
  return Record(slot.results, stream);
}

absl::Status RowTransfers::DownloadSlice(const ChunkJob& job, const ChunkSlot& slot,
                                         const SliceLayout& place) {
  const cudaStream_t stream = device_->download();
  const int64_t row_bytes = RowBytes(job);
  const int64_t begin = std::max(job.raw_rows_here.begin, place.raw_begin);
  const int64_t end = std::min(job.raw_rows_here.end, place.raw_begin + place.slice->rows);
  if (begin >= end) return absl::OkStatus();
  auto* to = static_cast<uint8_t*>(place.slice->grad_hidden) + (begin - place.raw_begin) * row_bytes;
  const int64_t rows = end - begin;
  // HeadNorm::Backward has written the gradients over the raw rows.
  if (config_.norm != Norm::kNone) {
    return Copy(to, static_cast<const uint8_t*>(slot.memory.raw) + begin * row_bytes, rows * row_bytes,
                stream);
  }
  uint8_t* const gradient = workspace_.paths[Region::kHiddenGradient];
  if (IsDirect(job, place, place.compact_rows - place.absent_rows)) {
    return Copy(to, gradient + place.compact_begin * row_bytes, rows * row_bytes, stream);
  }
  const DeviceMatrix source = {gradient, job.hidden_gradient_dtype, sizes_.hidden, sizes_.padded_hidden};
  const DeviceMatrix buffer = {workspace_.download_buffer, job.chunk->hidden_dtype, sizes_.hidden,
                               sizes_.hidden};
  const int64_t block_rows = sizes_.transfer_bytes / row_bytes;
  for (int64_t r = 0; r < rows; r += block_rows) {
    const int64_t count = std::min(block_rows, rows - r);
    LOSSD_RETURN_IF_CUDA_ERROR(LaunchScatterRows(source, buffer, slot.device_in.gradient_of_raw + begin + r,
                                                 count, job.hidden_gradient_factor(), stream),
                               "scatter kernel");
    LOSSD_RETURN_IF_ERROR(Copy(to + r * row_bytes, buffer.data, count * row_bytes, stream));
  }
  return absl::OkStatus();
}

absl::Status ZeroUntouchedGradients(const Chunk& chunk, const ChunkLayout& layout, int64_t hidden_size) {
  for (const SliceLayout& place : layout.slices) {
    void* const gradient = place.slice->grad_hidden;
    if (place.compact_rows > 0 || gradient == nullptr) continue;
    const auto bytes = static_cast<size_t>(place.slice->rows * hidden_size) * SizeOf(chunk.hidden_dtype);
    cudaPointerAttributes attributes = {};
    LOSSD_RETURN_IF_CUDA_ERROR(cudaPointerGetAttributes(&attributes, gradient), "cudaPointerGetAttributes");
    if (attributes.type != cudaMemoryTypeDevice) {
      std::memset(gradient, 0, bytes);
      continue;
    }
    LOSSD_RETURN_IF_ERROR(ZeroAndWait(gradient, static_cast<int64_t>(bytes)));
  }
  return absl::OkStatus();
}

}  // namespace lossd::kernels::cuda
