// SPDX-License-Identifier: Apache-2.0
// What the host decides of a chunk before anything is enqueued: which kernels compute it, and why those
// (ChunkPlan), and where its rows go on the device (ChunkLayout).
//
// Pure functions; thread-safe. The header needs no CUDA.
#ifndef LOSSD_KERNELS_CUDA_PATHS_CHUNK_PLAN_H_
#define LOSSD_KERNELS_CUDA_PATHS_CHUNK_PLAN_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/strings/string_view.h"
#include "kernels/backend.h"
#include "kernels/cuda/cuda_options.h"
#include "kernels/cuda/device/device_limits.h"
#include "kernels/cuda/device/device_memory.h"
#include "kernels/cuda/kernels/launch_plan.h"
#include "kernels/cuda/kernels/loss_rows.h"
#include "kernels/cuda/paths/path_memory.h"
#include "kernels/decision.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

// ---- which kernels compute a chunk ----

struct ChunkPlan {
  // kFiltered and kAuto: the device decides when it has seen the logits.
  Gradients gradients = Gradients::kExact;
  // Gradients from a list get the uniform part of label smoothing in closed form, instead of in ds.
  bool uniform_apart = false;
  // Filtered gradients are selected from the matrix of ds, not from the logits.
  bool filters_elements = false;
  bool distilled = false;  // the rows have a teacher
  // "": the products of the logits leave the softmaxes of student and teacher (hopper::SoftmaxPass), so that
  // the logits are read once.
  absl::string_view why_logits_twice;
  absl::string_view why_exact;      // "" unless gradients are kExact
  absl::string_view why_not_fused;  // "": the loss is computed in the epilogue of the logits product
  // "": the gradients are products of our own (hopper/gradient_gemm.h) instead of cuBLASLt's.
  absl::string_view why_library_gemms;
  std::optional<NormPlan> norm;           // none: the head has no norm
  std::optional<NormPlan> norm_gradient;  // none: it has no norm, or none is wanted

  bool filtered() const { return gradients == Gradients::kFiltered; }
  bool sampled() const { return MaySample(gradients); }
  bool exact() const { return gradients == Gradients::kExact; }
  bool fused() const { return why_not_fused.empty(); }
  bool own_gemms() const { return why_library_gemms.empty(); }
};

// What the plan needs to know of a chunk beside its options.
struct ChunkFacts {
  LossTerms terms;
  int64_t rows = 0;
  int64_t padded_rows = 0;
  bool wants_gradient = false;
  bool distilled = false;    // the rows have a teacher
  bool selects_top = false;  // some slice wants the most probable classes
};

// What it needs to know of the head and the device.
struct PlanLimits {
  Logits logits = Logits::kStored;
  FilterShape filter;  // of the head; of one that is split, of the part with most classes
  DeviceLimits device;
  FusedLoss fused_loss = FusedLoss::kWhereFaster;
  bool split = false;  // the head is split by vocabulary
};

// All but the norm. Where logits are recomputed, products are cuBLASLt's, and the pass that computes the loss
// stores nothing.
ChunkPlan PlanChunk(const LossOptions& options, const ChunkFacts& chunk, const PlanLimits& limits);

std::vector<Choice> Describe(const ChunkPlan& plan);

// ---- where the rows of a chunk go on the device ----

// The rows of a chunk of gradients of an embedding that are accumulated here, by class: a run is the rows of
// one class (RowInputBlock::row_order() and the two after it). Runs of kLongClassRun rows and more come
// first, and runs of equal kind are in order of classes.
struct ClassRuns {
  int64_t rows = 0;
  int64_t runs = 0;
  int64_t long_runs = 0;

  friend bool operator==(const ClassRuns&, const ClassRuns&) = default;
};
inline constexpr int32_t kLongClassRun = 32;

// Rows without target are left out ("compact" rows are those that stay, in order), per-row factors of the
// gradient are formed, and a common power of two is taken out of them, so that 16-bit storage neither
// underflows nor overflows however small or large the scale of the loss.

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
  float* coef_loss = nullptr;     // grad_scale * grad_loss * row weight / unit
  float* coef_lse = nullptr;      // grad_lse / unit
  float* coef_entropy = nullptr;  // GradEntropyOf() / unit
  float* advantages = nullptr;    // of the objective, likewise below; 0 where it needs none
  float* old_logprobs = nullptr;
  float* ref_logprobs = nullptr;
  float* target_total = nullptr;  // SoftRow::total and rest; only of a chunk with soft targets
  float* target_rest = nullptr;
  float* omega = nullptr;          // SampleOf(); only of a chunk that may be sampled
  int32_t* slice_begin = nullptr;  // [capacity + 1]: first compact row of a slice that has any

  // Of a chunk of gradients of an embedding, in the place of the three before slice_begin, [capacity] each:
  // compact rows, and where each run of ClassRuns begins among them and how many rows it has.
  int32_t* row_order() const { return reinterpret_cast<int32_t*>(target_total); }
  int32_t* run_begin() const { return reinterpret_cast<int32_t*>(target_rest); }
  int32_t* run_rows() const { return reinterpret_cast<int32_t*>(omega); }

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
  float* divergence = nullptr;        // before its weight; only of a chunk with a teacher
  float* sample_threshold = nullptr;  // [1]
  int32_t* first_bad = nullptr;       // [slices with rows]: compact row or -1
  int32_t* lost = nullptr;       // [1]: not 0 if the chunk has left something in the accumulators that fails
  Decision* decision = nullptr;  // [1]; only of a chunk that may be filtered or sampled

  static RowOutputBlock Carve(Carver& carver, int64_t capacity);
};

// What slices want of single classes, compact order, in pinned memory of the host, where kernels read and
// write it.
struct RowClassBlock {
  // [rows, ChunkLayout::class_count], room for kMostGivenClasses a row: classes of the vocabulary, then their
  // logits in the same place.
  int32_t* classes = nullptr;
  // [rows, ChunkLayout::top_k], room for kMostTopClasses a row.
  float* top_logits = nullptr;
  int32_t* top_places = nullptr;

  // In the same places, of a chunk with soft targets, which has neither of the others: [rows,
  // ChunkLayout::target_count] each, room for kMostSoftTargets a row.
  int32_t* target_classes() const { return classes; }
  float* target_weights() const { return top_logits; }
  float* target_logits = nullptr;  // likewise: SoftRowInputs::logits
  NamedRow* named = nullptr;       // [rows], of such a chunk
  float* target_dots = nullptr;    // [rows], where no path claims Region::kTargetDots

  static RowClassBlock Carve(Carver& carver, int64_t capacity);
  float* class_logits() const { return reinterpret_cast<float*>(classes); }
};

// Bytes of the first two blocks, on the device and pinned on the host, and of the third, on the host alone.
int64_t InputBlockBytes(int64_t capacity);
int64_t OutputBlockBytes(int64_t capacity);
int64_t ClassBlockBytes(int64_t capacity);

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
  // What the slices want at most (kernels/backend.h); rows of all slices have room for as much.
  int32_t class_count = 0;
  int32_t top_k = 0;
  int32_t target_count = 0;  // soft targets of a row
  float unit = 1.0f;         // power of two taken out of coef_*
  // Set by the head; what is not exact has a decision. kFiltered: with dropped masses; else with variances.
  Gradients planned = Gradients::kExact;
  ClassRuns runs;  // set by the head, of a chunk of gradients of an embedding
};

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

// Writes the classes whose logits are wanted, if layout.class_count is not 0.
void PlaceClasses(const ChunkLayout& layout, const RowInputBlock& inputs, const RowClassBlock& classes);

// Writes the soft targets of the rows, if layout.target_count is not 0. `inputs` as LayOutChunk left it.
void PlaceSoftTargets(const ChunkLayout& layout, Rest rest, const RowInputBlock& inputs,
                      const RowClassBlock& classes);

// Orders the rows that are accumulated and whose classes are among the first `classes` from the layout's
// first_class on, by class and then by row, and writes them to `inputs`, as LayOutChunk left it.
ClassRuns OrderByClass(const ChunkLayout& layout, int64_t classes, const RowInputBlock& inputs);

// Hands the device's results to the chunk, the decision about its filter, and to the slices: row outputs,
// sums, first_nonfinite_row. Hidden gradients are not its business.
void UnpackResults(Chunk& chunk, const ChunkLayout& layout, const RowInputBlock& inputs,
                   const RowOutputBlock& outputs, const RowClassBlock& classes = {});

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_CHUNK_PLAN_H_
