// SPDX-License-Identifier: Apache-2.0
// The slots of a head: what belongs to one chunk from Submit to its end. Plain owners; driven by the
// backend's thread, but for the host blocks and events of a chunk in flight, which the completion thread
// reads.
#ifndef LOSSD_KERNELS_CUDA_HEADS_CHUNK_SLOTS_H_
#define LOSSD_KERNELS_CUDA_HEADS_CHUNK_SLOTS_H_

#include <array>
#include <optional>

#include "absl/status/status.h"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/device/device_branch.h"
#include "kernels/cuda/heads/head_memory.h"
#include "kernels/cuda/paths/chunk_layout.h"
#include "kernels/loss_options.h"

namespace lossd::kernels::cuda {

struct ChunkSlot {
  SlotMemory memory;
  PinnedBuffer host_inputs;
  PinnedBuffer host_outputs;
  RowInputBlock host_in, device_in;
  RowOutputBlock host_out, device_out;
  Event uploaded, row_results, hidden_gradient, results, done;
  DeviceBranch loss_branch, weight_branch;  // of a filtered chunk
  // The options of its chunk if that says whether others should try the filter, in host_out.decision.
  std::optional<LossOptions> trial;
};

class ChunkSlots {
 public:
  absl::Status Allocate(MemoryLedger* ledger, const HeadSizes& sizes, const Workspace& workspace);
  // The slots take turns. The chunk that had it before has left the device.
  ChunkSlot& Next();
  const ChunkSlot& first() const { return slots_[0]; }

 private:
  std::array<ChunkSlot, kChunkSlots> slots_;
  size_t next_ = 0;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_HEADS_CHUNK_SLOTS_H_
