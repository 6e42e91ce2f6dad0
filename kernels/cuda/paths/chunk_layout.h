// SPDX-License-Identifier: Apache-2.0
// Where the rows of a chunk go on the device: decided on the host, before anything is enqueued.
//
// Rows without target are left out ("compact" rows are those that stay, in order), per-row factors of the
// gradient are formed, and a common power of two is taken out of them, so that 16-bit storage neither
// underflows nor overflows however small or large the scale of the loss.
// Pure functions on host memory; no CUDA call is made.
#ifndef LOSSD_KERNELS_CUDA_PATHS_CHUNK_LAYOUT_H_
#define LOSSD_KERNELS_CUDA_PATHS_CHUNK_LAYOUT_H_

#include <cstdint>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/device/device_memory.h"
#include "kernels/cuda/kernels/row_checks.h"
#include "kernels/decision.h"

namespace lossd::kernels::cuda {

// Per-row inputs of the kernels, in one block that is copied at once. The same offsets on host and device.
struct RowInputBlock {
  int32_t* compact_of_raw = nullptr;   // [capacity]: -1 for rows without target
  int32_t* raw_of_compact = nullptr;   // [capacity]
  int32_t* gradient_of_raw = nullptr;  // [capacity]: compact_of_raw, but -1 for absent rows too
  // [capacity] each, by compact row.
  int32_t* target = nullptr;
  int32_t* accumulate = nullptr;
  int32_t* with_gradient = nullptr;  // accumulated, or its hidden gradient is wanted; no stand-in, not absent
  RowCheck* checks = nullptr;
  float* weight = nullptr;
  float* coef_loss = nullptr;      // grad_scale * grad_loss * row weight / unit
  float* coef_lse = nullptr;       // grad_lse / unit
  float* coef_entropy = nullptr;   // grad_entropy / unit
  float* omega = nullptr;          // SampleOf(); only of a chunk that may be sampled
  int32_t* slice_begin = nullptr;  // [capacity + 1]: first compact row of a slice that has any

  static RowInputBlock Carve(Carver& carver, int64_t capacity);
};

// Per-row results, compact order, and what was decided for all rows.
struct RowOutputBlock {
  float* loss = nullptr;
  float* z_loss = nullptr;
  float* lse = nullptr;
  float* entropy = nullptr;
  float* target_logprob = nullptr;
  int32_t* argmax = nullptr;
  float* dropped_mass = nullptr;      // only of a chunk that may be filtered
  float* variance = nullptr;          // over unit squared; only of a chunk that may be sampled
  float* square = nullptr;            // over unit squared; only of a chunk that may be sampled
  float* sample_threshold = nullptr;  // [1]
  int32_t* first_bad = nullptr;       // [slices with rows]: compact row or -1
  int32_t* lost = nullptr;       // [1]: not 0 if the chunk has left something in the accumulators that fails
  Decision* decision = nullptr;  // [1]; only of a chunk that may be filtered or sampled

  static RowOutputBlock Carve(Carver& carver, int64_t capacity);
};

// Bytes of the two blocks, on the device and pinned on the host.
int64_t InputBlockBytes(int64_t capacity);
int64_t OutputBlockBytes(int64_t capacity);

struct SliceLayout {
  Slice* slice = nullptr;
  int64_t raw_begin = 0;      // first raw row in the chunk
  int64_t compact_begin = 0;  // first compact row in the chunk
  int64_t compact_rows = 0;
  int64_t absent_rows = 0;    // of these (kernels/backend.h)
  int64_t device_index = -1;  // among the slices with compact rows
};

struct ChunkLayout {
  std::vector<SliceLayout> slices;
  int64_t raw_rows = 0;
  int64_t compact_rows = 0;
  int64_t absent_rows = 0;
  int64_t padded_rows = 0;  // what the GEMMs see: PadRows(compact_rows)
  int64_t device_slices = 0;
  bool want_hidden_gradient = false;
  bool accumulate = false;     // some row reaches the accumulators
  bool accumulate_all = true;  // every one does
  bool want_entropy = false;
  bool any_coef_entropy = false;
  float unit = 1.0f;  // power of two taken out of coef_*
  // Set by the head; what is not exact has a decision. kFiltered: with dropped masses; else with variances.
  Gradients planned = Gradients::kExact;
};

// Rows rounded up to what the GEMMs like; few distinct values, so that few algorithms are chosen.
constexpr int64_t PadRows(int64_t rows) { return rows <= 128 ? RoundUp(rows, 8) : RoundUp(rows, 128); }

// What the layout needs to know of the head.
struct LayoutHead {
  HeadConfig config;
  DType compute_dtype = DType::kBFloat16;
  int64_t chunk_rows = 0;
  float largest_class_weight = 1.0f;  // of those in use, by magnitude
  int64_t first_class = 0;            // targets are counted from this one on
};

// Lays out a valid chunk (kernels/validation.h) and fills `inputs` (host memory of capacity >=
// head.chunk_rows).
ChunkLayout LayOutChunk(const LayoutHead& head, const Chunk& chunk, const RowInputBlock& inputs);

// Hands the device's results to the chunk, the decision about its filter, and to the slices: row outputs,
// sums, first_nonfinite_row. Hidden gradients are not its business.
void UnpackResults(Chunk& chunk, const ChunkLayout& layout, const RowInputBlock& inputs,
                   const RowOutputBlock& outputs);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_CHUNK_LAYOUT_H_
