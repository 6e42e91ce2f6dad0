// SPDX-License-Identifier: Apache-2.0
// RowTransfers copies the rows of chunks between host and device. ChunkSlot has the memory and the events of
// one chunk of a head, from Submit to the end of the chunk.
#ifndef LOSSD_KERNELS_CUDA_HEADS_ROW_TRANSFERS_H_
#define LOSSD_KERNELS_CUDA_HEADS_ROW_TRANSFERS_H_

#include <array>
#include <optional>

#include "absl/status/status.h"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/device/device_branch.h"
#include "kernels/cuda/heads/head_memory.h"
#include "kernels/cuda/paths/chunk_path.h"
#include "kernels/cuda/paths/chunk_plan.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

// The memory and events of one chunk, from Submit to its end. Owns them. Used by the backend's driving
// thread; the completion thread also reads the host blocks and events of a chunk in flight.
struct ChunkSlot {
  SlotMemory memory;
  PinnedBuffer host_inputs;
  PinnedBuffer host_outputs;
  PinnedBuffer host_classes;
  // The inputs and results of the rows of the slot's chunk (LayOut), and how many bytes they take.
  RowInputBlock host_in, device_in;
  RowOutputBlock host_out, device_out;
  int64_t input_bytes = 0;
  int64_t output_bytes = 0;
  RowClassBlock classes;
  // `uploaded`: inputs and hidden states are on the device. `row_results`: the row results are complete, and
  // the guard has seen them. `hidden_gradient`: dx is complete, and the guard has seen it. `results`: row
  // results and dx have been copied to the slices' memory. `done`: the chunk has ended, its weight gradient
  // included.
  Event uploaded, row_results, hidden_gradient, results, done;
  DeviceBranch loss_branch, weight_branch;  // of a filtered chunk
  // Set if the slot's chunk tries to be filtered or sampled (FilterBackoff): the options of the chunk.
  // host_out.decision then says whether the trial succeeded.
  std::optional<LossOptions> trial;

  // Divides the memory for inputs and results of rows among the arrays for the rows of `chunk`. So the copies
  // of a chunk with few rows are short. host_out.decision stays where it is.
  void LayOut(const Chunk& chunk);
};

// The slots of a head. Called by the backend's driving thread.
class ChunkSlots {
 public:
  absl::Status Allocate(MemoryLedger* ledger, const HeadSizes& sizes);
  // Sets the place of the slots on the device. May be called again while no chunk is in flight.
  void Place(const Workspace& workspace);
  // Returns the slots in turn. The slot's last chunk must have left the device.
  ChunkSlot& Next();
  const ChunkSlot& first() const { return slots_[0]; }

 private:
  std::array<ChunkSlot, kChunkSlots> slots_;
  size_t next_ = 0;
};

// Copies rows between host and device, on the upload and download streams: hidden states and per-row inputs
// to the device, results and hidden gradients to the host. Rows are converted and compacted if their form
// differs between host and device. Called by the backend's driving thread.
class RowTransfers {
 public:
  // `device` outlives the object; `workspace` is the head's workspace.
  RowTransfers(Device* device, const HeadConfig& config, const HeadSizes& sizes, const Workspace& workspace)
      : device_(device), config_(config), sizes_(sizes), workspace_(workspace) {}
  absl::Status Start();  // call before any of the functions below

  // Enqueues the upload of all slices, and records slot.uploaded.
  absl::Status Upload(const ChunkJob& job, const ChunkSlot& slot);
  // Enqueues the download of the row results after slot.row_results, and of hidden gradients after
  // slot.hidden_gradient; records slot.results.
  absl::Status Download(const ChunkJob& job, const ChunkSlot& slot);
  // This event is recorded after the last download from Region::kHiddenGradient.
  const Event& download_idle() const { return download_idle_; }

 private:
  absl::Status UploadSlice(const ChunkJob& job, const ChunkSlot& slot, const SliceLayout& place);
  absl::Status DownloadSlice(const ChunkJob& job, const ChunkSlot& slot, const SliceLayout& place);
  // Whether the slice is copied without conversion: dtype and width of its rows are those of the device, and
  // all `rows` rows are wanted, so that no row has to be left out.
  bool IsDirect(const ChunkJob& job, const SliceLayout& place, int64_t rows) const;
  int64_t RowBytes(const ChunkJob& job) const;  // of one row in host memory

  Device* const device_;
  const HeadConfig config_;
  const HeadSizes sizes_;
  const Workspace workspace_;
  Event download_idle_;
};

// Zeroes the hidden gradients of slices without any target, because no kernel writes them, and waits until
// they are zero. Called on the device's completion thread.
absl::Status ZeroUntouchedGradients(const Chunk& chunk, const ChunkLayout& layout, int64_t hidden_size);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_HEADS_ROW_TRANSFERS_H_
