// SPDX-License-Identifier: Apache-2.0
// The chunks of a head whose rows are rows of its weight (LossOptions::embedding): rows go out, or gradients
// of rows come in. No product, norm or loss is computed of them. They use the slots and the memory that other
// chunks use, and need none of their own.
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

// Driven by the backend's thread.
class EmbeddingRows {
 public:
  // All outlive it; `workspace` is of the head.
  EmbeddingRows(Device* device, const HeadConfig& config, const HeadSizes& sizes, const Workspace& workspace,
                HeadTensors* tensors, const ClassLink* link, const RowTransfers* transfers)
      : device_(device),
        config_(config),
        sizes_(sizes),
        workspace_(workspace),
        tensors_(tensors),
        link_(link),
        transfers_(transfers) {}

  // Decides what has to be decided of a chunk that is laid out in `slot`, and says it in its choices.
  void Prepare(ChunkJob& job, ChunkSlot& slot) const;
  // Enqueues all that is to be done of a chunk with rows; records slot.results and slot.done.
  absl::Status Enqueue(const ChunkJob& job, const ChunkSlot& slot) const;

 private:
  // Where the raw rows of a chunk lie on the device, [raw_rows, D] of the chunk's hidden_dtype.
  RawRows PlaceOf(const ChunkJob& job, const ChunkSlot& slot) const;
  // Whether a part of them lies in Region::kHiddenGradient, which chunks share.
  bool SharesRegion(const ChunkJob& job) const;
  // What is enqueued on `stream` from now on may write there: other chunks have done with it.
  absl::Status AwaitRegion(const ChunkSlot& slot, cudaStream_t stream) const;
  // Calls `fn` for the pieces of raw rows [begin, begin + rows) that lie one after the other: where the piece
  // is, and which rows it has, counted from `begin`.
  using PieceFn = absl::FunctionRef<absl::Status(uint8_t* at, int64_t first, int64_t count)>;
  absl::Status ForPieces(const RawRows& place, int64_t begin, int64_t rows, PieceFn fn) const;

  absl::Status LookUp(const ChunkJob& job, const ChunkSlot& slot) const;
  // Raw rows [begin, begin + rows) to `to`, on the download stream.
  absl::Status Gather(const ChunkJob& job, const ChunkSlot& slot, int64_t begin, int64_t rows,
                      void* to) const;
  // Of a head that is split by vocabulary.
  absl::Status LookUpParts(const ChunkJob& job, const ChunkSlot& slot) const;
  absl::Status DownloadPart(const ChunkJob& job, const ChunkSlot& slot, const SliceLayout& place) const;
  // The weight that rows of this dtype are taken from, [classes here, D].
  DeviceMatrix SourceFor(DType dtype) const;

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
