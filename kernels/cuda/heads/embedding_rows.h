// SPDX-License-Identifier: Apache-2.0
// EmbeddingRows computes the chunks of embedding rows of a head: chunks whose rows are rows of the head's
// weight (LossOptions::embedding). Such a chunk either reads rows of the weight, or adds gradients to rows of
// the weight; it has no product, norm or loss. These chunks use the slots and the memory of other chunks, and
// need no memory of their own.
#ifndef LOSSD_KERNELS_CUDA_HEADS_EMBEDDING_ROWS_H_
#define LOSSD_KERNELS_CUDA_HEADS_EMBEDDING_ROWS_H_

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/heads/head_memory.h"
#include "kernels/cuda/heads/head_tensors.h"
#include "kernels/cuda/heads/row_transfers.h"
#include "kernels/cuda/kernels/embedding.h"
#include "kernels/cuda/paths/chunk_path.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

// Called by the backend's driving thread.
class EmbeddingRows {
 public:
  // All objects that are passed by pointer outlive this object. `workspace` is the head's workspace.
  EmbeddingRows(Device* device, const HeadConfig& config, const HeadSizes& sizes, const Workspace& workspace,
                HeadTensors* tensors, const ClassLink* link, const RowTransfers* transfers)
      : device_(device),
        config_(config),
        sizes_(sizes),
        workspace_(workspace),
        tensors_(tensors),
        link_(link),
        transfers_(transfers) {}

  // Plans a chunk that is laid out in `slot`, and describes the plan in the chunk's choices.
  void Prepare(ChunkJob& job, ChunkSlot& slot) const;
  // Enqueues all the work of a chunk with rows. Records slot.results and slot.done.
  absl::Status Enqueue(const ChunkJob& job, const ChunkSlot& slot) const;

 private:
  // Where the raw rows of a chunk lie on the device: [raw_rows, D] of the chunk's hidden_dtype. Raw rows are
  // all rows of the chunk's slices, in order; compact rows leave out the rows without a target.
  RawRows PlaceOf(const ChunkJob& job, const ChunkSlot& slot) const;
  // Whether part of the raw rows lies in Region::kHiddenGradient, which chunks share.
  bool SharesRegion(const ChunkJob& job) const;
  // Makes `stream` wait until other chunks no longer use Region::kHiddenGradient.
  absl::Status AwaitRegion(const ChunkSlot& slot, cudaStream_t stream) const;
  // Calls `fn` for each contiguous piece of the raw rows [begin, begin + rows): `at` is where the piece lies,
  // `first` its first row, counted from `begin`, and `count` its rows.
  using PieceFn = absl::FunctionRef<absl::Status(uint8_t* at, int64_t first, int64_t count)>;
  absl::Status ForPieces(const RawRows& place, int64_t begin, int64_t rows, PieceFn fn) const;

  // Enqueues a chunk that reads rows of the weight: gathers them, and delivers them to the slices.
  absl::Status LookUp(const ChunkJob& job, const ChunkSlot& slot) const;
  // Copies rows of the weight for the raw rows [begin, begin + rows) to `to`, on the download stream.
  absl::Status Gather(const ChunkJob& job, const ChunkSlot& slot, int64_t begin, int64_t rows,
                      void* to) const;
  // As LookUp, for a head that is split by vocabulary: each part has some of the rows, so the parts add up
  // their rows first. DownloadPart delivers those rows of one slice whose sums are on this device.
  absl::Status LookUpParts(const ChunkJob& job, const ChunkSlot& slot) const;
  absl::Status DownloadPart(const ChunkJob& job, const ChunkSlot& slot, const SliceLayout& place) const;
  // The weight from which rows of `dtype` are made: [classes here, D].
  DeviceMatrix SourceFor(DType dtype) const;

  // Enqueues a chunk that adds gradients to rows of the weight gradient, by the three functions below.
  // GuardGradients finds slices with a row that is not finite; AddGradients leaves these slices out.
  absl::Status TakeGradients(const ChunkJob& job, const ChunkSlot& slot) const;
  absl::Status UploadGradients(const ChunkJob& job, const ChunkSlot& slot) const;
  absl::Status GuardGradients(const ChunkJob& job, const ChunkSlot& slot) const;
  absl::Status AddGradients(const ChunkJob& job, const ChunkSlot& slot) const;

  Device* const device_;
  const HeadConfig config_;
  const HeadSizes sizes_;
  const Workspace workspace_;
  HeadTensors* const tensors_;
  const ClassLink* const link_;
  const RowTransfers* const transfers_;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_HEADS_EMBEDDING_ROWS_H_
