// SPDX-License-Identifier: Apache-2.0
// A chunk on its way through the engine: rows that are computed together, described by the schedule that put
// them together (schedule.h) and computed by a Flight (flight.h), which is the same for all schedules.
//
// A chunk is a list of segments. A segment is a run of rows of one microbatch; it belongs to the slices that
// hold its rows: usually one, several if the same rows were sent twice, or none if rows have to be computed
// that were not sent. Guarded by the engine's lock before the launch; a flight's own afterwards.
#ifndef LOSSD_SERVER_ENGINE_CHUNK_WORK_H_
#define LOSSD_SERVER_ENGINE_CHUNK_WORK_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/backend.h"
#include "server/engine/sample_seed.h"
#include "server/engine/slice_work.h"
#include "server/engine/stream.h"

namespace lossd::engine {

struct Segment {
  uint64_t microbatch_id = 0;
  RowRange rows;
  size_t index = 0;                // of its first row in the arrays over the chunk
  std::vector<SliceWork*> slices;  // that hold the rows, in order of arrival
  RowWants wants;                  // results that are computed
  kernels::Slice input;            // all that the backend is given but for the results
};

struct ChunkWork {
  virtual ~ChunkWork() = default;

  // Called on the device thread, without the lock, right before the launch.
  virtual void Prepare() = 0;
  // The members below are called with the lock held.
  // How the chunk was computed, before OnResults; not if that failed.
  virtual void OnComputed(const kernels::Chunk& chunk) {}
  // Results are there, and the memory of the slices is not in use any more. `all_good`: every slice has
  // results.
  virtual void OnResults(bool all_good) = 0;
  // The chunk has left the device, and the ledger knows what of it is settled.
  virtual void OnLeft() = 0;
  // True if a stream depends on rows of this chunk besides its own: then it ends if the device fails half-way
  // through accumulating the chunk.
  virtual bool Affects(const StreamState& stream) const = 0;

  std::vector<std::unique_ptr<SliceWork>> slices;  // in order of arrival
  std::vector<Segment> segments;                   // by index
  size_t rows = 0;                                 // length of the arrays over the chunk
  kernels::LossOptions options;
  kernels::DType hidden_dtype = kernels::DType::kBFloat16;
  bool accumulates = false;  // rows of the segments are reserved in the ledger
  // Rows are booked, and calls end, with the results instead of with the weight gradient.
  bool settles_with_results = false;
  uint64_t turn = 0;  // kernels::Chunk::turn
};

// Says which random numbers are those of some rows of the stream's microbatch.
inline void NameSamples(const StreamState& stream, RowRange rows, kernels::Slice& slice) {
  const StreamSpec& spec = stream.spec();
  slice.sample_seed = SampleSeed(spec.head, stream.head_state().step, spec.microbatch_id);
  slice.first_row = rows.begin;
}

// What the backend is given of rows of a stream. `memory`: where their hidden states are, unless they are
// retained, and where their gradients go, if wanted.
inline kernels::Slice InputOf(const StreamState& stream, RowRange rows, uint8_t* memory) {
  kernels::Slice slice;
  slice.rows = rows.size();
  slice.hidden = stream.is_backward() ? nullptr : memory;
  slice.retained_offset = stream.RetainedOffset(rows);
  slice.targets = stream.targets(rows);
  slice.row_weights = stream.row_weights(rows);
  slice.grad_scale = stream.grad_scale();
  slice.grad_loss = stream.grad_loss(rows);
  slice.grad_lse = stream.grad_lse(rows);
  slice.grad_entropy = stream.grad_entropy(rows);
  slice.grad_hidden = stream.spec().want_grad_hidden ? memory : nullptr;
  NameSamples(stream, rows, slice);
  return slice;
}

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_CHUNK_WORK_H_
