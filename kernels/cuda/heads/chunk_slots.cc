// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/heads/chunk_slots.h"

#include "kernels/cuda/device/cuda_status.h"

namespace lossd::kernels::cuda {

absl::Status ChunkSlots::Allocate(MemoryLedger* ledger, const HeadSizes& sizes, const Workspace& workspace) {
  const int64_t rows = sizes.chunk_rows;
  for (size_t i = 0; i < slots_.size(); ++i) {
    ChunkSlot& slot = slots_[i];
    slot.memory = workspace.slots[i];
    LOSSD_RETURN_IF_ERROR(Take(PinnedBuffer::Allocate(ledger, InputBlockBytes(rows)), slot.host_inputs));
    LOSSD_RETURN_IF_ERROR(Take(PinnedBuffer::Allocate(ledger, OutputBlockBytes(rows)), slot.host_outputs));
    Carver host_in(slot.host_inputs.data()), host_out(slot.host_outputs.data());
    Carver device_in(slot.memory.inputs), device_out(slot.memory.outputs);
    slot.host_in = RowInputBlock::Carve(host_in, rows);
    slot.host_out = RowOutputBlock::Carve(host_out, rows);
    slot.device_in = RowInputBlock::Carve(device_in, rows);
    slot.device_out = RowOutputBlock::Carve(device_out, rows);
    for (Event* event :
         {&slot.uploaded, &slot.row_results, &slot.hidden_gradient, &slot.results, &slot.done}) {
      LOSSD_RETURN_IF_ERROR(Take(Event::Create(), *event));
    }
  }
  return absl::OkStatus();
}

ChunkSlot& ChunkSlots::Next() {
  ChunkSlot& slot = slots_[next_];
  next_ = (next_ + 1) % slots_.size();
  return slot;
}

}  // namespace lossd::kernels::cuda
